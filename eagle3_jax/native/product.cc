// The product of rows with a matrix that is read once, from memory: an XLA custom call for the CPU.
//
// y[m, o] = sum over i of x[m, i] * w[i, o], in float32. The matrix lies in panels [P, I, W]: panel p holds outputs p W .. p W + W - 1, its I
// rows of W numbers one after the other, so that memory is read from one end to the other. Its numbers are float32, or int8 with a float32
// scale per output, which multiplies the sum.
//
// Every output is one chain of multiply-adds over i, however many rows there are and whichever thread computes it: a row's result has the
// same bits in a pass of one token and in one of sixty.

#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "pool.h"

namespace {

// Vectors in a row of a panel, and rows of x whose sums stay in registers beside them.
constexpr int kVectors = kLanes == 4 ? 4 : 2, kRows = kLanes == 16 ? 12 : 6;
constexpr int kWidth = kLanes * kVectors;

// Inputs of a panel at a time: they stay in the first-level cache while groups of rows go over them.
constexpr int64_t kInputs = 64;
constexpr int64_t kStrip = 96;    // rows of x at a time, whose sums are kept meanwhile
constexpr int64_t kAhead = 4096;  // bytes to fetch ahead of where a panel is read, when rows are few
constexpr int kLine = 64;         // bytes of a line of the cache
constexpr int kLines = kWidth * 4 / kLine;

using Floats = Vector<kLanes>::Floats;

// To the second-level cache: the first has hardly room for what is being read.
inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

inline Floats load(const float* at) { return load<kLanes>(at); }
inline void store(float* at, Floats value) { store<kLanes>(at, value); }

// Floats of as many bytes. Compilers left alone convert them one by one.
inline Floats load(const int8_t* at) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#else
  Floats floats;
  for (int i = 0; i < kLanes; ++i) floats[i] = at[i];
  return floats;
#endif
}

// Adds `count` inputs of one panel to the sums y [rows, W] of `rows` rows, and fetches `lines` lines per input of what comes next.
template <int rows, int lines, typename Weight>
void add_panel(int64_t count, int64_t stride, const float* x, const Weight* w, const char* next, float* y) {
  constexpr int64_t kStep = sizeof(Weight) == 1 ? kWidth : lines * kLine;
  Floats sum[rows][kVectors];
  for (int m = 0; m < rows; ++m)
    for (int v = 0; v < kVectors; ++v) sum[m][v] = load(y + m * kWidth + v * kLanes);
  for (int64_t i = 0; i < count; ++i) {
    Floats weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = load(w + i * kWidth + v * kLanes);
    for (int n = 0; n < lines; ++n) fetch(next + i * kStep + n * kLine);
    for (int m = 0; m < rows; ++m)
      for (int v = 0; v < kVectors; ++v) sum[m][v] += x[m * stride + i] * weights[v];
  }
  for (int m = 0; m < rows; ++m)
    for (int v = 0; v < kVectors; ++v) store(y + m * kWidth + v * kLanes, sum[m][v]);
}

// The same with the number of rows known only now.
template <int most, int lines, typename Weight>
void add_rows(int64_t rows, int64_t count, int64_t stride, const float* x, const Weight* w, const char* next, float* y) {
  if constexpr (most > 1) {
    if (rows < most) return add_rows<most - 1, lines>(rows, count, stride, x, w, next, y);
  }
  add_panel<most, lines>(count, stride, x, w, next, y);
}

// `count` rows of a panel as floats; int8 ones are written to `room`.
inline const float* as_floats(const float* w, int64_t, float*) { return w; }
inline const float* as_floats(const int8_t* w, int64_t count, float* room) {
  for (int64_t at = 0; at < count * kWidth; at += kLanes) {
    store(room + at, load(w + at));
    if (at % kLine == 0) fetch(w + at + kAhead);
  }
  return room;
}

template <typename Weight>
struct Product {
  const float* x;      // [M, I]
  const Weight* w;     // [P, I, W]
  const float* scale;  // [O], or null
  float* y;            // [M, O]
  int64_t rows, inputs, outputs;

  bool run(int64_t p) const {
    const Weight* panel = w + p * inputs * kWidth;
    const int64_t width = least(kWidth, outputs - p * kWidth);
    for (int64_t strip = 0; strip < rows; strip += kStrip) {
      const int64_t here = least(kStrip, rows - strip), groups = (here + kRows - 1) / kRows;
      alignas(64) float sums[kStrip * kWidth];
      memset(sums, 0, here * kWidth * sizeof(float));
      for (int64_t begin = 0; begin < inputs; begin += kInputs) {
        const int64_t count = least(kInputs, inputs - begin);
        const Weight* const block = panel + begin * kWidth;
        const float* const from = x + strip * inputs + begin;
        if (groups == 1) {
          constexpr int lines = (kWidth * sizeof(Weight) + kLine - 1) / kLine;
          add_rows<kRows, lines>(here, count, inputs, from, block, reinterpret_cast<const char*>(block) + kAhead, sums);
          continue;
        }
        alignas(64) float room[sizeof(Weight) == 4 ? 1 : kInputs * kWidth];
        const float* const weights = as_floats(block, count, room);
        for (int64_t g = 0; g < groups; ++g) {  // as even as can be: a group of one costs nearly what a full one does
          const int64_t first = here * g / groups, some = here * (g + 1) / groups - first;
          // The first groups fetch the inputs that follow, a line each, or memory would rest while all but one compute.
          const char* const after = reinterpret_cast<const char*>(weights) + (count * kLines + g * count) * kLine;
          if (sizeof(Weight) == 1 || strip || g >= kLines)
            add_rows<kRows, 0>(some, count, inputs, from + first * inputs, weights, after, sums + first * kWidth);
          else
            add_rows<kRows, 1>(some, count, inputs, from + first * inputs, weights, after, sums + first * kWidth);
        }
      }
      for (int64_t m = 0; m < here; ++m) {
        float* out = y + (strip + m) * outputs + p * kWidth;
        for (int64_t o = 0; o < width; ++o) out[o] = scale ? sums[m * kWidth + o] * scale[p * kWidth + o] : sums[m * kWidth + o];
      }
    }
    return true;
  }
};

}  // namespace

// x [M, I], w [P, I, W] and, for int8, scale [O] -> y [M, O].
extern "C" XLA_FFI_Error* eagle3_product(XLA_FFI_CallFrame* frame) {
  if (answered(frame)) return nullptr;
  if (frame->args.size < 2 || frame->args.size > 3 || frame->rets.size != 1) return refuse(frame, "product: expected x, w, perhaps scale");
  const XLA_FFI_Buffer &x = argument(frame, 0), &w = argument(frame, 1), &y = result(frame);
  if (x.dtype != XLA_FFI_DataType_F32 || y.dtype != XLA_FFI_DataType_F32 || x.rank != 2 || y.rank != 2 || w.rank != 3)
    return refuse(frame, "product: x and y must be float32 matrices, w panels [P, I, W]");
  const int64_t rows = x.dims[0], inputs = x.dims[1], outputs = y.dims[1], panels = (outputs + kWidth - 1) / kWidth;
  if (y.dims[0] != rows || w.dims[0] != panels || w.dims[1] != inputs || w.dims[2] != kWidth)
    return refuse(frame, "product: shapes of x, w and y do not belong together");
  const float* scale = nullptr;
  if (frame->args.size == 3) {
    const XLA_FFI_Buffer& given = argument(frame, 2);
    if (given.dtype != XLA_FFI_DataType_F32 || given.rank != 1 || given.dims[0] != outputs)
      return refuse(frame, "product: one float32 scale per output");
    scale = data<const float>(given);
  }
  if (w.dtype == XLA_FFI_DataType_F32)
    return share(frame, Product<float>{data<const float>(x), data<const float>(w), scale, data<float>(y), rows, inputs, outputs}, panels);
  if (w.dtype == XLA_FFI_DataType_S8)
    return share(frame, Product<int8_t>{data<const float>(x), data<const int8_t>(w), scale, data<float>(y), rows, inputs, outputs}, panels);
  return refuse(frame, "product: weights must be float32 or int8");
}

// W, which is this machine's.
extern "C" int eagle3_panel_width() { return kWidth; }
