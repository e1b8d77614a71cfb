// The product of rows with a matrix that is read once, from memory: an XLA custom call for the CPU.
//
// y[m, o] = sum over i of x[m, i] * w[i, o], in float32. The matrix lies in panels [P, I, W]: panel p holds outputs p W .. p W + W - 1, its I
// rows of W numbers one after the other, so that memory is read from one end to the other. Its numbers are float32, or int8 with a float32
// scale per output, which multiplies the sum.
//
// What stands before and after a product in a layer is done here too, where each would be an operation of its own, for microseconds: x
// may be normed by its root mean square, or be silu(gate) * up of two rows, and a bias and a residual may be added to y.
//
// Every output is one chain of multiply-adds over i, however many rows there are and whichever thread computes it: a row's result has the
// same bits in a pass of one token and in one of sixty.

#include <math.h>
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
constexpr int64_t kAhead = 6144;  // bytes to fetch ahead of where a panel is read, when rows are few
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

// What x is made of: `row(m)` writes row m of it.
struct Source {
  const float* given;  // [M, I], or gate and up [M, 2, I]
  const float* norm;   // [I], or null
  float epsilon;
  bool gated;
  float* x;  // [M, I]
  int64_t inputs;

  bool whole() const { return !norm && !gated; }  // x is what is given

  void row(int64_t m) const {
    if (norm)
      normed(given + m * inputs, x + m * inputs);
    else
      gate(given + 2 * m * inputs, given + (2 * m + 1) * inputs, x + m * inputs);
  }

  void normed(const float* from, float* to) const {
    Floats sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= inputs; i += 2 * kLanes)
      for (int v = 0; v < 2; ++v) sums[v] += load(from + i + v * kLanes) * load(from + i + v * kLanes);
    sums[0] += sums[1];
    float sum = 0;
    for (int l = 0; l < kLanes; ++l) sum += sums[0][l];
    for (; i < inputs; ++i) sum += from[i] * from[i];
    const float factor = 1.0f / sqrtf(sum / static_cast<float>(inputs) + epsilon);
    for (i = 0; i + kLanes <= inputs; i += kLanes) store(to + i, load(from + i) * factor * load(norm + i));
    for (; i < inputs; ++i) to[i] = from[i] * factor * norm[i];
  }

  void gate(const float* gates, const float* up, float* to) const {
    int64_t i = 0;
    for (; i + kLanes <= inputs; i += kLanes) store(to + i, silu(load(gates + i)) * load(up + i));
    for (; i < inputs; ++i) to[i] = (silu(Floats{} + gates[i]) * up[i])[0];
  }

  static Floats silu(Floats x) {
    const Floats small = exponential<kLanes>(x < 0 ? x : -x);  // no overflow
    return x * (x < 0 ? (x < -87.0f ? Floats{} : small) : Floats{} + 1.0f) / (small + 1.0f);
  }
};

template <typename Weight>
struct Product {
  Source source;
  const float* x;      // [M, I], its rows as they are multiplied
  const Weight* w;     // [P, I, W]
  const float* scale;  // [O], or null
  const float* bias;   // [O], or null
  const float* onto;   // [M, O], or null
  float* y;            // [M, O]
  int64_t rows, inputs, outputs;
  std::atomic<int64_t>* prepared;  // rows of x

  int64_t sources() const { return source.whole() ? 0 : rows; }
  int64_t pieces() const { return sources() + ceiling(outputs, kWidth); }

  bool run(int64_t piece) const {
    if (piece < sources()) {
      source.row(piece);
      prepared->fetch_add(1, std::memory_order_release);
    } else {
      for (int spins = 0; prepared->load(std::memory_order_acquire) < sources(); ++spins)  // somebody is at each of them
        if (spins > 1000) sched_yield();
      multiply_panel(piece - sources());
    }
    return true;
  }

  void multiply_panel(int64_t p) const {
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
      for (int64_t m = 0; m < here; ++m) finish(sums + m * kWidth, strip + m, p * kWidth, width);
    }
  }

  // Outputs o .. o + width - 1 of row m from their sums.
  void finish(float* sums, int64_t m, int64_t o, int64_t width) const {
    float* const out = y + m * outputs + o;
    int64_t v = 0;
    for (; v + kLanes <= width; v += kLanes)
      store(out + v, finished(load(sums + v), scale ? load(scale + o + v) : Floats{}, bias ? load(bias + o + v) : Floats{},
                              onto ? load(onto + m * outputs + o + v) : Floats{}));
    for (; v < width; ++v)
      out[v] = finished(Floats{} + sums[v], scale ? Floats{} + scale[o + v] : Floats{}, bias ? Floats{} + bias[o + v] : Floats{},
                        onto ? Floats{} + onto[m * outputs + o + v] : Floats{})[0];
  }

  Floats finished(Floats sum, Floats scales, Floats biases, Floats residual) const {
    if (scale) sum *= scales;
    if (bias) sum += biases;
    return onto ? sum + residual : sum;
  }
};

template <typename Weight>
XLA_FFI_Error* multiply(XLA_FFI_CallFrame* frame, Product<Weight> work) {
  std::atomic<int64_t> prepared{0};  // nobody looks at it any more when `share` is back
  work.prepared = &prepared;
  return share(frame, work, work.pieces());
}

// An operand of `size` floats, or of none: null.
bool optional(const XLA_FFI_Buffer& buffer, int64_t size, const float** floats) {
  int64_t given = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) given *= buffer.dims[i];
  *floats = given ? data<const float>(buffer) : nullptr;
  return buffer.dtype == XLA_FFI_DataType_F32 && (given == 0 || given == size);
}

}  // namespace

// x [M, I], or gate and up [M, 2, I]; w [P, I, W]; and, each of which may have no elements, scale [O], which int8 has, bias [O], the weight
// of a norm of x [I] with its epsilon [1], residual [M, O] -> y [M, O] and room for the rows that are made of x [M, I], without elements
// where x is multiplied as it is.
extern "C" XLA_FFI_Error* eagle3_product(XLA_FFI_CallFrame* frame) {
  if (answered(frame)) return nullptr;
  if (frame->args.size != 7 || frame->rets.size != 2) return refuse(frame, "product: expected seven arguments and two results");
  const XLA_FFI_Buffer &x = argument(frame, 0), &w = argument(frame, 1), &y = result(frame, 0), &room = result(frame, 1);
  if (x.dtype != XLA_FFI_DataType_F32 || y.dtype != XLA_FFI_DataType_F32 || x.rank < 2 || x.rank > 3 || y.rank != 2 || w.rank != 3)
    return refuse(frame, "product: x and y must be float32 matrices, w panels [P, I, W]");
  const int64_t rows = x.dims[0], inputs = x.dims[x.rank - 1], outputs = y.dims[1], panels = ceiling(outputs, kWidth);
  const bool gated = x.rank == 3;
  if (y.dims[0] != rows || w.dims[0] != panels || w.dims[1] != inputs || w.dims[2] != kWidth || (gated && x.dims[1] != 2))
    return refuse(frame, "product: shapes of x, w and y do not belong together");
  if (rows == 0) return nullptr;
  const float *scale, *bias, *norm, *epsilon, *onto, *made;
  if (!optional(argument(frame, 2), outputs, &scale) || !optional(argument(frame, 3), outputs, &bias) ||
      !optional(argument(frame, 4), inputs, &norm) || !optional(argument(frame, 5), 1, &epsilon) ||
      !optional(argument(frame, 6), rows * outputs, &onto) || !optional(room, rows * inputs, &made))
    return refuse(frame, "product: scale, bias, norm and residual must be float32, of the sizes of x and y");
  if (!norm != !epsilon || (norm && gated) || (!norm && !gated) != !made)
    return refuse(frame, "product: x is normed, with a weight and an epsilon, or gated; there must be room for it then");
  const Source source{data<const float>(x), norm, norm ? *epsilon : 0, gated, const_cast<float*>(made), inputs};
  const float* const multiplied = made ? made : source.given;
  if (w.dtype == XLA_FFI_DataType_F32)
    return multiply<float>(
        frame, {source, multiplied, data<const float>(w), scale, bias, onto, data<float>(y), rows, inputs, outputs, nullptr});
  if (w.dtype == XLA_FFI_DataType_S8)
    return multiply<int8_t>(
        frame, {source, multiplied, data<const int8_t>(w), scale, bias, onto, data<float>(y), rows, inputs, outputs, nullptr});
  return refuse(frame, "product: weights must be float32 or int8");
}

// W, which is this machine's.
extern "C" int eagle3_panel_width() { return kWidth; }
