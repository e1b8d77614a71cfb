// Soft cross-entropy of drafts against their teacher, and its gradient, in one walk over the logits: an XLA custom call for the CPU.
//
// Entry r has one teacher, logits [R, U], and J drafts, logits [J, R, U], in float32. Per draft: the loss -sum_u p log q with
// p = softmax(teacher) and q = softmax(draft); whether the draft's first best is the entry's label; and weight (q - p), the weighted loss's
// gradient, in float32 or bfloat16. A weight of zero gives a gradient of zero, whatever the logits are.

#include <math.h>

#include "lanes.h"
#include "pool.h"

namespace {

using Floats = Vector<kLanes>::Floats;
using Ints = Vector<kLanes>::Ints;

constexpr float kLow = -1e30f;  // behind the end of a row: no weight, and no NaN

inline float total(Floats x) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}
inline float largest(Floats x) {
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// The numbers of a row from `at` on; kLow where there are none.
inline Floats some(const float* row, int64_t at, int64_t width) {
  if (at + kLanes <= width) return load<kLanes>(row + at);
  Floats x = Floats{} + kLow;
  for (int64_t i = at; i < width; ++i) x[i - at] = row[i];
  return x;
}

inline float peak(const float* row, int64_t width) {
  Floats most = some(row, 0, width);
  for (int64_t at = kLanes; at < width; at += kLanes) {
    const Floats x = some(row, at, width);
    most = x > most ? x : most;
  }
  return largest(most);
}

// Rounded to the nearest, ties to even; NaN stays NaN.
inline void put(uint16_t* to, int64_t count, Floats x) {
  const Ints bits = (Ints)x;
  const Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Ints kept = x == x ? rounded : Ints{} + 0x7fc0;
  for (int64_t i = 0; i < least(count, kLanes); ++i) to[i] = static_cast<uint16_t>(kept[i]);
}

template <typename Number>
struct CrossEntropy {
  const float *draft, *teacher, *weight;  // [J, R, U], [R, U], [J, R]
  const int32_t* label;                   // [R]; none where negative
  float* loss;                            // [J, R]
  bool* correct;                          // [J, R]
  Number* gradient;                       // [J, R, U]
  int64_t steps, rows, width;

  bool run(int64_t row) const {
    const int64_t padded = ceiling(width, kLanes) * kLanes;
    static thread_local Room room;
    float* const p = room.of(2 * padded);
    if (!p) return false;
    float* const e = p + padded;
    const float* const t = teacher + row * width;
    const float high = peak(t, width);
    Floats sum = {};
    for (int64_t at = 0; at < width; at += kLanes) {
      const Floats x = exponential<kLanes>(some(t, at, width) - high);
      store<kLanes>(p + at, x);
      sum += x;
    }
    for (int64_t i = width; i < padded; ++i) p[i] = 0;
    const float all = 1.0f / total(sum);
    for (int64_t at = 0; at < width; at += kLanes) store<kLanes>(p + at, load<kLanes>(p + at) * all);
    for (int64_t j = 0; j < steps; ++j) one(j * rows + row, row, p, e);
    return true;
  }

  void one(int64_t here, int64_t row, const float* p, float* e) const {
    const float* const d = draft + here * width;
    const float high = peak(d, width);
    const float own = label[row] >= 0 && label[row] < width ? d[label[row]] : INFINITY;
    Floats sum = {}, apart = {};
    Ints above = {};
    for (int64_t at = 0; at < width; at += kLanes) {
      const Floats raw = some(d, at, width), x = raw - high, q = exponential<kLanes>(x);
      store<kLanes>(e + at, q);
      sum += q;
      apart += load<kLanes>(p + at) * x;
      above |= (Ints)(raw > own);
    }
    float before = 0;  // an equal one in front of the label is the first best
    for (int64_t i = 0; i < least(label[row], width); ++i) before += d[i] == own;
    int32_t over = 0;
    for (int i = 0; i < kLanes; ++i) over |= above[i];
    const float norm = total(sum);
    loss[here] = logf(norm) - total(apart);
    correct[here] = own < INFINITY && high == own && !over && before == 0;
    const float w = weight[here], scale = w / norm;
    Number* const g = gradient + here * width;
    for (int64_t at = 0; at < width; at += kLanes)
      put(g + at, width - at, w == 0 ? Floats{} : load<kLanes>(e + at) * scale - load<kLanes>(p + at) * w);
  }
};

template <typename Number>
XLA_FFI_Error* with(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer& draft = argument(frame, 0);
  return share(frame,
               CrossEntropy<Number>{data<const float>(draft), data<const float>(argument(frame, 1)), data<const float>(argument(frame, 2)),
                                    data<const int32_t>(argument(frame, 3)), data<float>(result(frame)), data<bool>(result(frame, 1)),
                                    data<Number>(result(frame, 2)), draft.dims[0], draft.dims[1], draft.dims[2]},
               draft.dims[2] ? draft.dims[1] : 0);
}

}  // namespace

// draft [J, R, U], teacher [R, U], weight [J, R], label int32 [R] -> loss [J, R], correct bool [J, R], gradient [J, R, U].
extern "C" XLA_FFI_Error* eagle3_cross_entropy(XLA_FFI_CallFrame* frame) {
  if (answered(frame)) return nullptr;
  if (frame->args.size != 4 || frame->rets.size != 3) return refuse(frame, "cross_entropy: expected draft, teacher, weight and label");
  const XLA_FFI_Buffer &draft = argument(frame, 0), &gradient = result(frame, 2);
  if (draft.rank != 3) return refuse(frame, "cross_entropy: drafts are [J, R, U]");
  const int64_t J = draft.dims[0], R = draft.dims[1], U = draft.dims[2];
  constexpr auto floats = XLA_FFI_DataType_F32;
  if (!shaped(draft, floats, 3, J, R, U) || !shaped(argument(frame, 1), floats, 2, R, U) || !shaped(argument(frame, 2), floats, 2, J, R) ||
      !shaped(argument(frame, 3), XLA_FFI_DataType_S32, 1, R) || !shaped(result(frame), floats, 2, J, R) ||
      !shaped(result(frame, 1), XLA_FFI_DataType_PRED, 2, J, R))
    return refuse(frame, "cross_entropy: types or shapes do not belong together");
  if (shaped(gradient, floats, 3, J, R, U)) return with<float>(frame);
  if (shaped(gradient, XLA_FFI_DataType_BF16, 3, J, R, U)) return with<uint16_t>(frame);
  return refuse(frame, "cross_entropy: the gradient must be float32 or bfloat16, like the drafts in shape");
}
