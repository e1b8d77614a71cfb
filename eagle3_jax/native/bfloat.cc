// Products of bfloat16 matrices with float32 sums, by the processor's own instruction: XLA custom calls for the CPU.
//
// y[m, n] = sum over k of a(m, k) b(k, n), in float32, rounded once where y is bfloat16. Three functions, for a product and its two
// gradients: a [M, K] b [K, N]; the first given transposed, [K, M]; the second, [N, K].
//
// Two more give, of each row of a product, the largest number and where it stands first, by groups of columns: a vocabulary's argmax
// without its logits.
//
// The instruction adds two products to each of sixteen sums: operands are laid out in pairs along k, a in tiles of kRows rows, b in panels
// of kColumns columns. Every output is one chain over k, whatever M and N are and whichever thread computes it.

#include <math.h>
#include <stdlib.h>
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#define EAGLE3_BFLOAT 1
#else
#define EAGLE3_BFLOAT 0
#endif

#include "lanes.h"
#include "pool.h"

#if EAGLE3_BFLOAT

namespace {

constexpr int kVectors = 2, kRows = 12;  // sums of a tile: 24 registers of sixteen
constexpr int kWide = 16, kColumns = kWide * kVectors;

// A matrix whose entries (i, k) are wanted in pairs along k, i being a row of a or a column of b.
struct Operand {
  const uint16_t* at;
  int64_t count, inputs;  // of i and of k
  bool inputs_last;       // stored [count, inputs], else [inputs, count]

  int64_t pairs() const { return ceiling(inputs, 2); }
};

// Sixteen rows of sixteen numbers become columns.
inline void turn(__m512i x[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0x88);
      y[i + 4 + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0xdd);
    }
  for (int j = 0; j < 4; ++j) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88);
    x[4 + j] = _mm512_shuffle_i32x4(y[4 + j], y[12 + j], 0x88);
    x[8 + j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd);
    x[12 + j] = _mm512_shuffle_i32x4(y[4 + j], y[12 + j], 0xdd);
  }
}

// Entries first .. first + width - 1, width at most 16, as pairs: to[p * stride + i]. What lies outside of the operand is zero.
inline void pack(const Operand& from, int64_t first, int width, uint32_t* to, int64_t stride) {
  const int64_t pairs = from.pairs();
  const int here = static_cast<int>(least(width, from.count - first));
  const __mmask16 kept = static_cast<__mmask16>((1u << width) - 1);
  if (here <= 0) {
    for (int64_t p = 0; p < pairs; ++p) _mm512_mask_storeu_epi32(to + p * stride, kept, _mm512_setzero_si512());
    return;
  }
  const __mmask16 there = static_cast<__mmask16>((1u << here) - 1);
  if (!from.inputs_last) {
    for (int64_t p = 0; p < pairs; ++p) {
      const uint16_t* const row = from.at + 2 * p * from.count + first;
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, row));
      const __mmask16 second = 2 * p + 1 < from.inputs ? there : 0;
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(second, second ? row + from.count : row));
      _mm512_mask_storeu_epi32(to + p * stride, kept, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    return;
  }
  for (int64_t p = 0; p < pairs; p += 16) {
    const int64_t left = from.inputs - 2 * p;
    const __mmask32 some = left >= 32 ? ~0u : (1u << left) - 1;
    __m512i x[16];
    for (int i = 0; i < 16; ++i)
      x[i] = i < here ? _mm512_maskz_loadu_epi16(some, from.at + (first + i) * from.inputs + 2 * p) : _mm512_setzero_si512();
    turn(x);
    for (int64_t i = 0; i < least(16, pairs - p); ++i) _mm512_mask_storeu_epi32(to + (p + i) * stride, kept, x[i]);
  }
}

struct Tiles {
  Operand a;
  uint32_t* to;

  bool run(int64_t tile) const {
    pack(a, tile * kRows, kRows, to + tile * kRows * (a.pairs()), kRows);
    return true;
  }
};

// The sums of a tile with a panel, [kRows, kColumns]. They stay in registers until the end: whoever looks at single ones does so in memory.
void multiply(const uint32_t* tile, const uint32_t* panel, int64_t pairs, float* sums) {
  __m512 sum[kRows][kVectors];
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = (__m512bh)_mm512_load_si512(panel + p * kColumns + v * kWide);
    for (int m = 0; m < kRows; ++m) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(tile[p * kRows + m]));
      for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], x, w[v]);
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < kVectors; ++v) _mm512_store_ps(sums + m * kColumns + v * kWide, sum[m][v]);
}

// A panel of b, packed, in memory of the thread's. Null where there is none.
struct Packed {
  uint32_t* at;
  __mmask16 there[kVectors];  // columns that there are

  explicit Packed(int64_t inputs) {
    static thread_local Room room;
    at = reinterpret_cast<uint32_t*>(room.of((inputs / 2 + 1) * kColumns));
  }
  void fill(const Operand& b, int64_t first) {
    for (int v = 0; v < kVectors; ++v) {
      pack(b, first + v * kWide, kWide, at + v * kWide, kColumns);
      const int64_t left = b.count - first - v * kWide;
      there[v] = left >= kWide ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
    }
  }
};

inline void put(float* at, __mmask16 there, __m512 sum) { _mm512_mask_storeu_ps(at, there, sum); }
inline void put(uint16_t* at, __mmask16 there, __m512 sum) { _mm256_mask_storeu_epi16(at, there, (__m256i)_mm512_cvtneps_pbh(sum)); }

// The product, a panel at a time.
template <typename Number>
struct Panels {
  Operand b;
  const uint32_t* a;  // tiles
  Number* y;          // [M, N]
  int64_t rows;

  static constexpr int64_t kColumnsOfPiece = kColumns;
  bool run(int64_t piece) const {
    const int64_t pairs = b.pairs(), first = piece * kColumns;
    Packed panel(b.inputs);
    if (!panel.at) return false;
    panel.fill(b, first);
    for (int64_t row = 0; row < rows; row += kRows) {
      alignas(64) float sums[kRows * kColumns];
      multiply(a + row * pairs, panel.at, pairs, sums);
      for (int64_t m = 0; m < least(kRows, rows - row); ++m)
        for (int v = 0; v < kVectors; ++v)
          put(y + (row + m) * b.count + first + v * kWide, panel.there[v], _mm512_load_ps(sums + m * kColumns + v * kWide));
    }
    return true;
  }
};

// The best of each row among a group of columns.
struct Best {
  Operand b;
  const uint32_t* a;
  float* peak;   // [groups, M]
  int32_t* id;
  int64_t rows;

  static constexpr int64_t kColumnsOfPiece = 16 * kColumns;
  bool run(int64_t piece) const {
    const int64_t pairs = b.pairs(), begin = piece * kColumnsOfPiece, end = least(begin + kColumnsOfPiece, b.count);
    Packed panel(b.inputs);
    if (!panel.at) return false;
    float* const peaks = peak + piece * rows;
    int32_t* const ids = id + piece * rows;
    for (int64_t row = 0; row < rows; ++row) peaks[row] = -INFINITY, ids[row] = static_cast<int32_t>(begin);
    for (int64_t first = begin; first < end; first += kColumns) {
      panel.fill(b, first);
      for (int64_t row = 0; row < rows; row += kRows) {
        alignas(64) float sums[kRows * kColumns];
        multiply(a + row * pairs, panel.at, pairs, sums);
        for (int64_t m = 0; m < least(kRows, rows - row); ++m) {
          __m512 sum[kVectors], best = _mm512_set1_ps(-INFINITY);
          for (int v = 0; v < kVectors; ++v) {
            sum[v] = _mm512_load_ps(sums + m * kColumns + v * kWide);
            best = _mm512_mask_max_ps(best, panel.there[v], best, sum[v]);
          }
          const float largest = _mm512_reduce_max_ps(best);
          if (!(largest > peaks[row + m])) continue;
          uint32_t where = 0;
          for (int v = 0; v < kVectors; ++v)
            where |= static_cast<uint32_t>(_mm512_mask_cmp_ps_mask(panel.there[v], sum[v], _mm512_set1_ps(largest), _CMP_EQ_OQ))
                     << (v * kWide);
          peaks[row + m] = largest;
          ids[row + m] = static_cast<int32_t>(first + __builtin_ctz(where));
        }
      }
    }
    return true;
  }
};

// Packs a, and does the work of every piece of b's columns.
template <typename Work>
XLA_FFI_Error* with_tiles(XLA_FFI_CallFrame* frame, const Operand& a, Work work) {
  const int64_t pairs = a.pairs(), tiles = ceiling(a.count, kRows);
  const int64_t pieces = ceiling(work.b.count, Work::kColumnsOfPiece);
  if (!tiles || !pieces) return nullptr;
  auto* const packed = static_cast<uint32_t*>(malloc(static_cast<size_t>(tiles * kRows * (pairs ? pairs : 1)) * 4));
  if (!packed) return refuse(frame, kNoMemory, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
  work.a = packed;
  XLA_FFI_Error* error = share(frame, Tiles{a, packed}, tiles);
  if (!error) error = share(frame, work, pieces);
  free(packed);
  return error;
}

// The two operands; null where they are none.
const char* read(XLA_FFI_CallFrame* frame, bool first_turned, bool second_turned, Operand* left, Operand* right) {
  if (frame->args.size != 2) return "bfloat16 product: expected two matrices";
  const XLA_FFI_Buffer &a = argument(frame, 0), &b = argument(frame, 1);
  if (a.dtype != XLA_FFI_DataType_BF16 || b.dtype != XLA_FFI_DataType_BF16 || a.rank != 2 || b.rank != 2)
    return "bfloat16 product: operands must be bfloat16 matrices";
  *left = Operand{data<const uint16_t>(a), a.dims[first_turned], a.dims[!first_turned], !first_turned};
  *right = Operand{data<const uint16_t>(b), b.dims[!second_turned], b.dims[second_turned], second_turned};
  return left->inputs == right->inputs ? nullptr : "bfloat16 product: shapes do not belong together";
}

XLA_FFI_Error* product(XLA_FFI_CallFrame* frame, bool first_turned, bool second_turned) {
  if (answered(frame)) return nullptr;
  Operand left, right;
  if (const char* wrong = read(frame, first_turned, second_turned, &left, &right)) return refuse(frame, wrong);
  if (frame->rets.size != 1) return refuse(frame, "bfloat16 product: expected one result");
  const XLA_FFI_Buffer& y = result(frame);
  if (shaped(y, XLA_FFI_DataType_F32, 2, left.count, right.count))
    return with_tiles(frame, left, Panels<float>{right, nullptr, data<float>(y), left.count});
  if (shaped(y, XLA_FFI_DataType_BF16, 2, left.count, right.count))
    return with_tiles(frame, left, Panels<uint16_t>{right, nullptr, data<uint16_t>(y), left.count});
  return refuse(frame, "bfloat16 product: the result must be [M, N], float32 or bfloat16");
}

XLA_FFI_Error* best(XLA_FFI_CallFrame* frame, bool second_turned) {
  if (answered(frame)) return nullptr;
  Operand left, right;
  if (const char* wrong = read(frame, false, second_turned, &left, &right)) return refuse(frame, wrong);
  if (frame->rets.size != 2) return refuse(frame, "bfloat16 argmax: expected two results");
  const XLA_FFI_Buffer &peak = result(frame, 0), &id = result(frame, 1);
  const int64_t groups = ceiling(right.count, Best::kColumnsOfPiece);
  if (!shaped(peak, XLA_FFI_DataType_F32, 2, groups, left.count) || !shaped(id, XLA_FFI_DataType_S32, 2, groups, left.count))
    return refuse(frame, "bfloat16 argmax: results are [groups, M], floats and ids");
  return with_tiles(frame, left, Best{right, nullptr, data<float>(peak), data<int32_t>(id), left.count});
}

}  // namespace

#else

namespace {

XLA_FFI_Error* without(XLA_FFI_CallFrame* frame) {
  return answered(frame) ? nullptr : refuse(frame, "bfloat16 product: this processor has no instruction for it");
}
XLA_FFI_Error* product(XLA_FFI_CallFrame* frame, bool, bool) { return without(frame); }
XLA_FFI_Error* best(XLA_FFI_CallFrame* frame, bool) { return without(frame); }

}  // namespace

#endif

extern "C" XLA_FFI_Error* eagle3_bfloat(XLA_FFI_CallFrame* frame) { return product(frame, false, false); }
extern "C" XLA_FFI_Error* eagle3_bfloat_first_turned(XLA_FFI_CallFrame* frame) { return product(frame, true, false); }
extern "C" XLA_FFI_Error* eagle3_bfloat_second_turned(XLA_FFI_CallFrame* frame) { return product(frame, false, true); }
extern "C" XLA_FFI_Error* eagle3_bfloat_best(XLA_FFI_CallFrame* frame) { return best(frame, false); }
extern "C" XLA_FFI_Error* eagle3_bfloat_best_second_turned(XLA_FFI_CallFrame* frame) { return best(frame, true); }

// Whether the functions above do more than refuse.
extern "C" int eagle3_has_bfloat() { return EAGLE3_BFLOAT; }

// Columns of a group of the argmax.
extern "C" int eagle3_bfloat_group() {
#if EAGLE3_BFLOAT
  return Best::kColumnsOfPiece;
#else
  return 0;
#endif
}
