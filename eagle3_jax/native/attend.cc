// Attention of a pass of few tokens over the key/value cache and over the pass's own keys: an XLA custom call for the CPU.
//
// One softmax per query and head, over the slots below the row's length (and not below the query's oldest), and over those own keys that
// the mask lets it see; what it does not see leaves no trace, whatever it is, and one that sees nothing gets zeros. XLA computes the scores
// of all slots that there are, and its small batched products are slow: at 60 tokens, or at 16 rows, they take as long as the weights.
//
// Layouts are those of `attention.attend`: q [B, T, N, H], own k and v [B, R, K, H], mask [B or 1, T, R], cache k [B, K, H, S] and
// v [B, K, S, H].

#include <math.h>
#include <stdlib.h>

#include "lanes.h"
#include "pool.h"

namespace {

constexpr int kQueries = 6;  // of one key/value head that are taken together: each key is then read once for all of them
constexpr int kBlock = 4;    // vectors of slots, or of a head's width, whose sums stay in registers beside them

// e^x for x <= 0, within two units in the last place; NaN stays NaN. Range reduction and polynomial: Cephes, expf.
template <int lanes>
inline typename Vector<lanes>::Floats exponential(typename Vector<lanes>::Floats x) {
  using Floats = typename Vector<lanes>::Floats;
  using Ints = typename Vector<lanes>::Ints;
  x = x < -87.0f ? Floats{} - 87.0f : x;
  const Floats shifted = x * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Ints power = ((Ints)shifted - 0x4B400000 + 127) << 23;
  return (p * r * r + r + 1.0f) * (Floats)power;
}

// The scores, later the weights, of the item that a thread is at; grows, and goes with the thread. Null where there is no memory.
struct Room {
  float* at = nullptr;
  int64_t size = 0;
  ~Room() { free(at); }
  float* of(int64_t wanted) {
    if (wanted > size) {
      free(at);
      at = static_cast<float*>(aligned_alloc(64, (wanted * sizeof(float) + 63) / 64 * 64));
      size = at ? wanted : 0;
    }
    return at;
  }
};

template <int lanes>
struct Attend {
  using Floats = typename Vector<lanes>::Floats;
  const float *q, *k, *v;
  const bool* mask;
  const float *k_cache, *v_cache;
  const int32_t *lengths, *oldest;  // oldest: null, or [B, T]
  float* out;                       // [B, T, N, H]
  int64_t batch, tokens, heads, kv_heads, width, own, slots, mask_rows;

  int64_t queries() const { return tokens * (heads / kv_heads); }  // of one row and key/value head, the group's heads of a token together
  int64_t blocks() const { return (queries() + kQueries - 1) / kQueries; }
  int64_t pieces() const { return batch * kv_heads * blocks(); }

  const bool* seen(int64_t row, int64_t token) const { return mask + ((mask_rows == 1 ? 0 : row) * tokens + token) * own; }

  bool run(int64_t piece) const {
    const int64_t block = piece % blocks(), head = piece / blocks() % kv_heads, row = piece / blocks() / kv_heads;
    const int64_t first = queries() * block / blocks(), count = queries() * (block + 1) / blocks() - first;
    return with_count<kQueries>(count, row, head, first);
  }

  template <int most>
  bool with_count(int64_t count, int64_t row, int64_t head, int64_t first) const {
    if constexpr (most > 1) {
      if (count < most) return with_count<most - 1>(count, row, head, first);
    }
    return item<most>(row, head, first);
  }

  template <int count>
  bool item(int64_t row, int64_t head, int64_t first) const {
    const int64_t group = heads / kv_heads, length = least(lengths[row] < 0 ? 0 : lengths[row], slots), stride = slots + own;
    static thread_local Room room;
    float* const scores = room.of(count * stride + count * width);
    if (!scores) return false;
    float* const asked = scores + count * stride;  // the queries, scaled
    int64_t token[count], head_of[count], begin[count], start = length, common = 0;
    const float scale = 1.0f / sqrtf(static_cast<float>(width));
    for (int x = 0; x < count; ++x) {
      token[x] = (first + x) / group;
      head_of[x] = head * group + (first + x) % group;
      begin[x] = oldest ? least(length, oldest[row * tokens + token[x]] < 0 ? 0 : oldest[row * tokens + token[x]]) : 0;
      start = least(start, begin[x]);
      common = begin[x] > common ? begin[x] : common;
      const float* from = q + ((row * tokens + token[x]) * heads + head_of[x]) * width;
      for (int64_t h = 0; h < width; ++h) asked[x * width + h] = from[h] * scale;
    }
    const float* const keys = k_cache + (row * kv_heads + head) * width * slots;
    const float* const values = v_cache + (row * kv_heads + head) * slots * width;

    // Scores of slots; some behind the length with them, whose numbers are not used.
    int64_t s = start / lanes * lanes;
    for (; s < length && s + kBlock * lanes <= slots; s += kBlock * lanes) score<count, kBlock>(asked, keys + s, scores + s, stride);
    for (; s < length && s + lanes <= slots; s += lanes) score<count, 1>(asked, keys + s, scores + s, stride);
    for (; s < length; ++s)
      for (int x = 0; x < count; ++x) {
        float sum = 0;
        for (int64_t h = 0; h < width; ++h) sum += asked[x * width + h] * keys[h * slots + s];
        scores[x * stride + s] = sum;
      }

    Floats sums[count][kBlock];
    float total[count];
    for (int x = 0; x < count; ++x) {
      float* const mine = scores + x * stride;
      float peak = -INFINITY;
      for (int64_t i = begin[x]; i < length; ++i) peak = mine[i] > peak ? mine[i] : peak;
      const bool* const sees = seen(row, token[x]);
      for (int64_t r = 0; r < own; ++r)
        if (sees[r]) {
          mine[slots + r] = dot(asked + x * width, k + ((row * own + r) * kv_heads + head) * width);
          peak = mine[slots + r] > peak ? mine[slots + r] : peak;
        }
      total[x] = weigh(mine + begin[x], length - begin[x], peak);
      for (int64_t r = 0; r < own; ++r)
        if (sees[r]) total[x] += weigh(mine + slots + r, 1, peak);
    }

    for (int64_t h = 0; h < width;) {
      const int64_t vectors = least(kBlock, (width - h) / lanes);
      for (int x = 0; x < count; ++x)
        for (int i = 0; i < kBlock; ++i) sums[x][i] = Floats{};
      // Slots that not all see, then those that all do.
      for (int x = 0; x < count; ++x) add<1>(vectors, scores + x * stride, values + h, begin[x], common, stride, sums + x);
      add<count>(vectors, scores, values + h, common, length, stride, sums);
      for (int x = 0; x < count; ++x) {
        const bool* const sees = seen(row, token[x]);
        for (int64_t r = 0; r < own; ++r)
          if (sees[r])
            for (int i = 0; i < vectors; ++i)
              sums[x][i] += scores[x * stride + slots + r] * load<lanes>(v + ((row * own + r) * kv_heads + head) * width + h + i * lanes);
        float* to = out + ((row * tokens + token[x]) * heads + head_of[x]) * width + h;
        for (int i = 0; i < vectors; ++i) store<lanes>(to + i * lanes, total[x] == 0 ? Floats{} : sums[x][i] / total[x]);
      }
      h += vectors * lanes;
    }
    return true;
  }

  template <int count, int vectors>
  void score(const float* asked, const float* keys, float* scores, int64_t stride) const {
    Floats sum[count][vectors] = {};
    for (int64_t h = 0; h < width; ++h)
      for (int i = 0; i < vectors; ++i) {
        const Floats key = load<lanes>(keys + h * slots + i * lanes);
        for (int x = 0; x < count; ++x) sum[x][i] += asked[x * width + h] * key;
      }
    for (int x = 0; x < count; ++x)
      for (int i = 0; i < vectors; ++i) store<lanes>(scores + x * stride + i * lanes, sum[x][i]);
  }

  float dot(const float* a, const float* b) const {
    Floats sum = {};
    for (int64_t h = 0; h < width; h += lanes) sum += load<lanes>(a + h) * load<lanes>(b + h);
    float whole = 0;
    for (int i = 0; i < lanes; ++i) whole += sum[i];
    return whole;
  }

  // Scores become weights; returns their sum.
  float weigh(float* scores, int64_t count, float peak) const {
    Floats sum = {};
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const Floats weight = exponential<lanes>(load<lanes>(scores + i) - peak);
      store<lanes>(scores + i, weight);
      sum += weight;
    }
    float whole = 0;
    for (int n = 0; n < lanes; ++n) whole += sum[n];
    for (; i < count; ++i) {
      const Floats weight = exponential<lanes>(Floats{} + (scores[i] - peak));
      scores[i] = weight[0];
      whole += weight[0];
    }
    return whole;
  }

  // Adds the values of slots `from` to `to`, by weight; kBlock vectors of the width at once, or fewer one by one.
  template <int count>
  void add(int64_t vectors, const float* weights, const float* values, int64_t from, int64_t to, int64_t stride,
           Floats (*sums)[kBlock]) const {
    if (vectors == kBlock) return add_vectors<count, kBlock>(weights, values, from, to, stride, sums, 0);
    for (int i = 0; i < vectors; ++i) add_vectors<count, 1>(weights, values + i * lanes, from, to, stride, sums, i);
  }

  template <int count, int vectors>
  void add_vectors(const float* weights, const float* values, int64_t from, int64_t to, int64_t stride, Floats (*sums)[kBlock],
                   int at) const {
    Floats sum[count][vectors];
    for (int x = 0; x < count; ++x)
      for (int i = 0; i < vectors; ++i) sum[x][i] = sums[x][at + i];
    for (int64_t s = from; s < to; ++s)
      for (int i = 0; i < vectors; ++i) {
        const Floats value = load<lanes>(values + s * width + i * lanes);
        for (int x = 0; x < count; ++x) sum[x][i] += weights[x * stride + s] * value;
      }
    for (int x = 0; x < count; ++x)
      for (int i = 0; i < vectors; ++i) sums[x][at + i] = sum[x][i];
  }
};

template <int lanes>
XLA_FFI_Error* attend(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer &q = argument(frame, 0), &k = argument(frame, 1), &mask = argument(frame, 3), &cache = argument(frame, 4);
  Attend<lanes> work = {};
  work.q = data<const float>(q);
  work.k = data<const float>(k);
  work.v = data<const float>(argument(frame, 2));
  work.mask = data<const bool>(mask);
  work.k_cache = data<const float>(cache);
  work.v_cache = data<const float>(argument(frame, 5));
  work.lengths = data<const int32_t>(argument(frame, 6));
  work.oldest = frame->args.size == 8 ? data<const int32_t>(argument(frame, 7)) : nullptr;
  work.out = data<float>(result(frame));
  work.batch = q.dims[0], work.tokens = q.dims[1], work.heads = q.dims[2], work.width = q.dims[3];
  work.own = k.dims[1], work.kv_heads = k.dims[2], work.slots = cache.dims[3], work.mask_rows = mask.dims[0];
  return share(frame, work, work.pieces());
}

bool shaped(const XLA_FFI_Buffer& buffer, XLA_FFI_DataType dtype, int64_t rank, int64_t a, int64_t b, int64_t c = 0, int64_t d = 0) {
  const int64_t want[] = {a, b, c, d};
  bool same = buffer.dtype == dtype && buffer.rank == rank;
  for (int i = 0; same && i < rank; ++i) same = buffer.dims[i] == want[i];
  return same;
}

}  // namespace

// q, own k, own v, mask, cached k, cached v, lengths and perhaps oldest -> [B, T, N, H].
extern "C" XLA_FFI_Error* eagle3_attend(XLA_FFI_CallFrame* frame) {
  if (answered(frame)) return nullptr;
  if (frame->args.size < 7 || frame->args.size > 8 || frame->rets.size != 1) return refuse(frame, "attend: expected seven or eight arguments");
  const XLA_FFI_Buffer &q = argument(frame, 0), &k = argument(frame, 1), &mask = argument(frame, 3), &cache = argument(frame, 4);
  if (q.rank != 4 || k.rank != 4 || mask.rank != 3 || cache.rank != 4) return refuse(frame, "attend: ranks are wrong");
  const int64_t B = q.dims[0], T = q.dims[1], N = q.dims[2], H = q.dims[3], R = k.dims[1], K = k.dims[2], S = cache.dims[3];
  const auto floats = XLA_FFI_DataType_F32, ints = XLA_FFI_DataType_S32;
  const bool fit = shaped(q, floats, 4, B, T, N, H) && shaped(k, floats, 4, B, R, K, H) && shaped(argument(frame, 2), floats, 4, B, R, K, H) &&
                   (mask.dims[0] == B || mask.dims[0] == 1) && shaped(mask, XLA_FFI_DataType_PRED, 3, mask.dims[0], T, R) &&
                   shaped(cache, floats, 4, B, K, H, S) && shaped(argument(frame, 5), floats, 4, B, K, S, H) &&
                   shaped(argument(frame, 6), ints, 1, B, 0) && shaped(result(frame), floats, 4, B, T, N, H) &&
                   (frame->args.size == 7 || shaped(argument(frame, 7), ints, 2, B, T));
  if (!fit || K == 0 || N % K) return refuse(frame, "attend: types and shapes do not belong together");
  if (H % kLanes == 0) return attend<kLanes>(frame);
  if (H % 4 == 0) return attend<4>(frame);
  return refuse(frame, "attend: a head's width must be a multiple of 4");
}
