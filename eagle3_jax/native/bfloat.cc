// Products of bfloat16 matrices with float32 sums, by the processor's own instruction: XLA custom calls for the CPU.
//
// y[m, n] = sum over k of a(m, k) b(k, n), in float32, rounded once where y is bfloat16. Three functions, for a product and its two
// gradients: a [M, K] b [K, N]; the first given transposed, [K, M]; the second, [N, K].
//
// The instruction adds two products to each of sixteen sums: operands are laid out in pairs along k, a in tiles of kRows rows, b in panels
// of kColumns columns. Every output is one chain over k, whatever M and N are and whichever thread computes it.

#include <stdlib.h>
#include <string.h>
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
  const int64_t pairs = (from.inputs + 1) / 2;
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
    pack(a, tile * kRows, kRows, to + tile * kRows * ((a.inputs + 1) / 2), kRows);
    return true;
  }
};

template <typename Number>
struct Panels {
  Operand b;
  const uint32_t* a;  // tiles
  Number* y;          // [M, N]
  int64_t rows;

  static void put(float* at, __mmask16 there, __m512 sum) { _mm512_mask_storeu_ps(at, there, sum); }
  static void put(uint16_t* at, __mmask16 there, __m512 sum) {
    _mm256_mask_storeu_epi16(at, there, (__m256i)_mm512_cvtneps_pbh(sum));
  }

  bool run(int64_t panel) const {
    const int64_t pairs = (b.inputs + 1) / 2, first = panel * kColumns;
    auto* const packed = static_cast<uint32_t*>(aligned_alloc(64, static_cast<size_t>(pairs ? pairs : 1) * kColumns * 4));
    if (!packed) return false;
    __mmask16 there[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      pack(b, first + v * kWide, kWide, packed + v * kWide, kColumns);
      const int64_t left = b.count - first - v * kWide;
      there[v] = left >= kWide ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
    }
    for (int64_t row = 0; row < rows; row += kRows) {
      const uint32_t* const tile = a + row * pairs;
      __m512 sum[kRows][kVectors];
      for (int m = 0; m < kRows; ++m)
        for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm512_setzero_ps();
      for (int64_t p = 0; p < pairs; ++p) {
        __m512bh w[kVectors];
        for (int v = 0; v < kVectors; ++v) w[v] = (__m512bh)_mm512_load_si512(packed + p * kColumns + v * kWide);
        for (int m = 0; m < kRows; ++m) {
          const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(tile[p * kRows + m]));
          for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], x, w[v]);
        }
      }
      // Written out, so that the sums stay in registers.
      for (int m = 0; m < kRows; ++m)
        if (row + m < rows)
          for (int v = 0; v < kVectors; ++v) put(y + (row + m) * b.count + first + v * kWide, there[v], sum[m][v]);
    }
    free(packed);
    return true;
  }
};

template <typename Number>
XLA_FFI_Error* multiply(XLA_FFI_CallFrame* frame, const Operand& a, const Operand& b, Number* y) {
  const int64_t pairs = (a.inputs + 1) / 2, tiles = (a.count + kRows - 1) / kRows, panels = (b.count + kColumns - 1) / kColumns;
  if (!tiles || !panels) return nullptr;
  auto* const packed = static_cast<uint32_t*>(malloc(static_cast<size_t>(tiles * kRows * (pairs ? pairs : 1)) * 4));
  if (!packed) return refuse(frame, kNoMemory, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
  XLA_FFI_Error* error = share(frame, Tiles{a, packed}, tiles);
  if (!error) error = share(frame, Panels<Number>{b, packed, y, a.count}, panels);
  free(packed);
  return error;
}

XLA_FFI_Error* product(XLA_FFI_CallFrame* frame, bool first_turned, bool second_turned) {
  if (answered(frame)) return nullptr;
  if (frame->args.size != 2 || frame->rets.size != 1) return refuse(frame, "bfloat16 product: expected two matrices");
  const XLA_FFI_Buffer &a = argument(frame, 0), &b = argument(frame, 1), &y = result(frame);
  if (a.dtype != XLA_FFI_DataType_BF16 || b.dtype != XLA_FFI_DataType_BF16 || a.rank != 2 || b.rank != 2 || y.rank != 2)
    return refuse(frame, "bfloat16 product: operands must be bfloat16 matrices");
  const Operand left{data<const uint16_t>(a), a.dims[first_turned], a.dims[!first_turned], !first_turned};
  const Operand right{data<const uint16_t>(b), b.dims[!second_turned], b.dims[second_turned], second_turned};
  if (left.inputs != right.inputs || y.dims[0] != left.count || y.dims[1] != right.count)
    return refuse(frame, "bfloat16 product: shapes do not belong together");
  if (y.dtype == XLA_FFI_DataType_F32) return multiply(frame, left, right, data<float>(y));
  if (y.dtype == XLA_FFI_DataType_BF16) return multiply(frame, left, right, data<uint16_t>(y));
  return refuse(frame, "bfloat16 product: the result must be float32 or bfloat16");
}

}  // namespace

#else

namespace {

XLA_FFI_Error* product(XLA_FFI_CallFrame* frame, bool, bool) {
  if (answered(frame)) return nullptr;
  return refuse(frame, "bfloat16 product: this processor has no instruction for it");
}

}  // namespace

#endif

extern "C" XLA_FFI_Error* eagle3_bfloat(XLA_FFI_CallFrame* frame) { return product(frame, false, false); }
extern "C" XLA_FFI_Error* eagle3_bfloat_first_turned(XLA_FFI_CallFrame* frame) { return product(frame, true, false); }
extern "C" XLA_FFI_Error* eagle3_bfloat_second_turned(XLA_FFI_CallFrame* frame) { return product(frame, false, true); }

// Whether the functions above do more than refuse.
extern "C" int eagle3_has_bfloat() { return EAGLE3_BFLOAT; }
