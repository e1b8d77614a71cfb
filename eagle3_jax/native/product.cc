// The product of rows with a matrix that is read once, from memory: an XLA custom call for the CPU.
//
// y[m, o] = sum over i of x[m, i] * w[i, o], in float32. The matrix lies in panels [P, I, W]: panel p holds outputs p W .. p W + W - 1, its I
// rows of W numbers one after the other, so that memory is read from one end to the other. Its numbers are float32, or int8 with a float32
// scale per output, which multiplies the sum.
//
// Every output is one chain of multiply-adds over i, however many rows there are and whichever thread computes it: a row's result has the
// same bits in a pass of one token and in one of sixty.
//
// The threads are XLA's own. The caller takes panels from a counter beside them, and in the end waits only for panels that somebody has
// begun, so that no thread of the pool need ever come.

#include <sched.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <atomic>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace {

// Lanes of a vector, vectors in a row of a panel, and rows of x whose sums stay in registers beside them.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4, kRows = 6;
#elif defined(__AVX__)
constexpr int kLanes = 8, kVectors = 2, kRows = 6;
#else
constexpr int kLanes = 4, kVectors = 4, kRows = 6;
#endif
constexpr int kWidth = kLanes * kVectors;

// Inputs of a panel at a time: floats stay in the second-level cache while groups of rows go over them, those made of bytes in the first.
template <typename Weight>
constexpr int64_t kInputs = sizeof(Weight) == 4 ? 1024 : 64;
constexpr int64_t kStrip = 96;     // rows of x at a time, whose sums are kept meanwhile
constexpr int64_t kAhead = 2048;   // bytes to fetch ahead of where a panel is read

typedef float Floats __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline void store(float* at, Floats value) { *reinterpret_cast<Floats*>(at) = value; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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

// Adds `count` inputs of one panel to the sums y [rows, W] of `rows` rows.
template <int rows>
void add_panel(int64_t count, int64_t stride, const float* x, const float* w, float* y) {
  Floats sum[rows][kVectors];
  for (int m = 0; m < rows; ++m)
    for (int v = 0; v < kVectors; ++v) sum[m][v] = load(y + m * kWidth + v * kLanes);
  for (int64_t i = 0; i < count; ++i) {
    Floats weights[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const float* at = w + i * kWidth + v * kLanes;
      weights[v] = load(at);
      if (v * kLanes % 16 == 0) __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead);
    }
    for (int m = 0; m < rows; ++m)
      for (int v = 0; v < kVectors; ++v) sum[m][v] += x[m * stride + i] * weights[v];
  }
  for (int m = 0; m < rows; ++m)
    for (int v = 0; v < kVectors; ++v) store(y + m * kWidth + v * kLanes, sum[m][v]);
}

// The same with the number of rows known only now.
template <int most>
void add_rows(int64_t rows, int64_t count, int64_t stride, const float* x, const float* w, float* y) {
  if constexpr (most > 1) {
    if (rows < most) return add_rows<most - 1>(rows, count, stride, x, w, y);
  }
  add_panel<most>(count, stride, x, w, y);
}

// `count` rows of a panel as floats; int8 ones are written to `room`, which stays in the first-level cache.
inline const float* as_floats(const float* w, int64_t, float*) { return w; }
inline const float* as_floats(const int8_t* w, int64_t count, float* room) {
  for (int64_t at = 0; at < count * kWidth; at += kLanes) {
    store(room + at, load(w + at));
    if (at % 64 == 0) __builtin_prefetch(reinterpret_cast<const char*>(w + at) + kAhead);
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

  void run(int64_t p) const {
    const Weight* panel = w + p * inputs * kWidth;
    const int64_t width = least(kWidth, outputs - p * kWidth);
    for (int64_t strip = 0; strip < rows; strip += kStrip) {
      const int64_t here = least(kStrip, rows - strip), groups = (here + kRows - 1) / kRows;
      alignas(64) float sums[kStrip * kWidth];
      memset(sums, 0, here * kWidth * sizeof(float));
      for (int64_t begin = 0; begin < inputs; begin += kInputs<Weight>) {
        const int64_t count = least(kInputs<Weight>, inputs - begin);
        alignas(64) float room[sizeof(Weight) == 4 ? 1 : kInputs<Weight> * kWidth];
        const float* weights = as_floats(panel + begin * kWidth, count, room);
        for (int64_t g = 0; g < groups; ++g) {  // as even as can be: a group of one costs nearly what one of six does
          const int64_t first = here * g / groups, some = here * (g + 1) / groups - first;
          add_rows<kRows>(some, count, inputs, x + (strip + first) * inputs + begin, weights, sums + first * kWidth);
        }
      }
      for (int64_t m = 0; m < here; ++m) {
        float* out = y + (strip + m) * outputs + p * kWidth;
        for (int64_t o = 0; o < width; ++o) out[o] = scale ? sums[m * kWidth + o] * scale[p * kWidth + o] : sums[m * kWidth + o];
      }
    }
  }
};

// Work shared with threads of the pool. They may come after the call has ended: they then find nothing to do, and the last one frees it.
template <typename Weight>
struct Job {
  Product<Weight> product;
  int64_t panels;
  std::atomic<int64_t> next{0}, done{0}, users{1};

  void work() {
    int64_t mine = 0;
    for (int64_t p; (p = next.fetch_add(1, std::memory_order_relaxed)) < panels; ++mine) product.run(p);
    done.fetch_add(mine, std::memory_order_release);
  }
  void leave() {
    if (users.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

template <typename Weight>
void help(void* data) {
  auto* job = static_cast<Job<Weight>*>(data);
  job->work();
  job->leave();
}

template <typename Weight>
void run(XLA_FFI_CallFrame* frame, const Product<Weight>& product) {
  auto* job = new Job<Weight>;
  job->product = product;
  job->panels = (product.outputs + kWidth - 1) / kWidth;
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args ask = {};
  ask.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
  ask.ctx = frame->ctx;
  ask.num_threads = &threads;
  XLA_FFI_Error* alone = frame->api->XLA_FFI_ThreadPool_NumThreads(&ask);
  for (int64_t h = 1; !alone && h < least(threads, job->panels); ++h) {
    job->users.fetch_add(1, std::memory_order_relaxed);
    XLA_FFI_ThreadPool_Schedule_Args task = {};
    task.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    task.ctx = frame->ctx;
    task.task = help<Weight>;
    task.data = job;
    alone = frame->api->XLA_FFI_ThreadPool_Schedule(&task);
    if (alone) job->leave();
  }
  if (alone) {
    XLA_FFI_Error_Destroy_Args drop = {};
    drop.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    drop.error = alone;
    frame->api->XLA_FFI_Error_Destroy(&drop);
  }
  job->work();
  for (int spins = 0; job->done.load(std::memory_order_acquire) < job->panels; ++spins)
    if (spins > 1000) sched_yield();
  job->leave();
}

XLA_FFI_Error* refuse(XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

}  // namespace

// x [M, I], w [P, I, W] and, for int8, scale [O] -> y [M, O].
extern "C" XLA_FFI_Error* eagle3_product(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return nullptr;
  }
  if (frame->args.size < 2 || frame->args.size > 3 || frame->rets.size != 1) return refuse(frame, "product: expected x, w, perhaps scale");
  auto** given = reinterpret_cast<XLA_FFI_Buffer**>(frame->args.args);
  const XLA_FFI_Buffer &x = *given[0], &w = *given[1], &y = *static_cast<XLA_FFI_Buffer*>(frame->rets.rets[0]);
  const XLA_FFI_Buffer* scale = frame->args.size == 3 ? given[2] : nullptr;
  if (x.dtype != XLA_FFI_DataType_F32 || y.dtype != XLA_FFI_DataType_F32 || x.rank != 2 || y.rank != 2 || w.rank != 3)
    return refuse(frame, "product: x and y must be float32 matrices, w panels [P, I, W]");
  const int64_t rows = x.dims[0], inputs = x.dims[1], outputs = y.dims[1];
  if (y.dims[0] != rows || w.dims[0] != (outputs + kWidth - 1) / kWidth || w.dims[1] != inputs || w.dims[2] != kWidth)
    return refuse(frame, "product: shapes of x, w and y do not belong together");
  if (scale && (scale->dtype != XLA_FFI_DataType_F32 || scale->rank != 1 || scale->dims[0] != outputs))
    return refuse(frame, "product: one float32 scale per output");
  auto* in = static_cast<const float*>(x.data);
  auto* out = static_cast<float*>(y.data);
  auto* scales = scale ? static_cast<const float*>(scale->data) : nullptr;
  if (w.dtype == XLA_FFI_DataType_F32)
    run(frame, Product<float>{in, static_cast<const float*>(w.data), scales, out, rows, inputs, outputs});
  else if (w.dtype == XLA_FFI_DataType_S8)
    run(frame, Product<int8_t>{in, static_cast<const int8_t*>(w.data), scales, out, rows, inputs, outputs});
  else
    return refuse(frame, "product: weights must be float32 or int8");
  return nullptr;
}

// W, which is this machine's.
extern "C" int eagle3_panel_width() { return kWidth; }
