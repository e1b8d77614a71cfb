// Attention of a pass of few tokens over the key/value cache and over the pass's own keys: an XLA custom call for the CPU.
//
// One softmax per query and head, over the slots below the row's length (and not below the query's oldest), and over those own keys that
// the mask lets it see; what it does not see leaves no trace, whatever it is, and one that sees nothing gets zeros. XLA computes the scores
// of all slots that there are, and its small batched products are slow: at 60 tokens, or at 16 rows, they take as long as the weights.
//
// The own keys that a query sees follow the slots in order, as they will in the cache. Threads share the places of a row in chunks; each
// place has its chunk and its lane, and what the chunks give is added in order. So a query's result has the same bits whether a key is in
// the cache or in the pass, whatever else is in the pass, however large the cache, whoever computes it.
//
// Layouts are those of `attention.attend`: q [B, T, N, H], own k and v [B, R, K, H], mask [B or 1, T, R], cache k [B, K, H, S] and
// v [B, K, S, H].

#include <math.h>

#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "pool.h"

// Before the loops over sums that are to stay in registers: else the compiler first makes an array of them in memory.
#define UNROLLED _Pragma("GCC unroll 8")

namespace {

constexpr int kBlock = 4;          // vectors of slots, or of a head's width, whose sums stay in registers
// Queries of one key/value head that are taken together, whose sums all do: each key is then loaded once for them.
constexpr int kQueries = kRegisters == 32 ? 6 : 3;
constexpr int64_t kChunk = 256;    // places of a row that a thread takes; a multiple of kBlock vectors
constexpr int64_t kMost = 48;      // queries of one key/value head that a thread takes
constexpr int64_t kShares = 3;     // pieces for each thread: no more than balance asks for, as keys are read again for each
constexpr int64_t kLine = 64;      // bytes of a line of the processor's caches

template <int lanes>
struct Attend {
  using Floats = typename Vector<lanes>::Floats;
  using Ints = typename Vector<lanes>::Ints;
  static constexpr int64_t kSpan = kBlock * lanes;  // slots whose keys, or values, stay in the first cache for all queries
  static constexpr int kLines = kSpan * sizeof(float) / kLine;

  const float *q, *k, *v;
  const bool* mask;
  const float *k_cache, *v_cache;
  const int32_t *lengths, *oldest;  // oldest: null, or [B, T]
  float* out;                       // [B, T, N, H]
  int64_t batch, tokens, heads, kv_heads, width, own, slots, mask_rows;
  int64_t chunks, parts;        // of the longest row's places; of the queries of a row and key/value head
  float* sums;                  // [B, K, queries, chunks, stride()], see `Query`
  std::atomic<int64_t>* ended;  // [B, K, parts]: chunks that are done

  // How threads share the work; false where there is no memory for what they find.
  bool prepare(int64_t threads) {
    int64_t longest = 0;
    for (int64_t row = 0; row < batch; ++row) longest = std::max(longest, length(row));
    chunks = ceiling(longest + own, kChunk);
    parts = std::max(ceiling(kShares * threads, batch * kv_heads * chunks), ceiling(queries(), kMost));
    parts = least(parts, ceiling(queries(), kQueries));
    const int64_t counters = batch * kv_heads * parts, before = ceiling(counters * sizeof(*ended), sizeof(Floats)) * lanes;
    static thread_local Room room;
    sums = room.of(before + batch * kv_heads * queries() * chunks * stride());
    if (!sums) return false;
    ended = reinterpret_cast<std::atomic<int64_t>*>(sums);
    for (int64_t i = 0; i < counters; ++i) new (ended + i) std::atomic<int64_t>(0);
    sums += before;
    return true;
  }

  int64_t group() const { return heads / kv_heads; }
  int64_t queries() const { return tokens * group(); }  // of one row and key/value head, the group's heads of a token together
  int64_t stride() const { return width + 2 * lanes; }
  int64_t pieces() const { return batch * kv_heads * chunks * parts; }
  int64_t length(int64_t row) const { return lengths[row] < 0 ? 0 : least(lengths[row], slots); }

  // What a query reads of a chunk: places `begin` to `end`, slots and then own keys. sums, [stride()]: of values by weight; of weights, by
  // lane; the highest score; 1 if there is anything to read.
  struct Query {
    const bool* sees;  // [R]
    int64_t begin, end;
    float* sums;
  };

  // What a thread works on: `count` queries of a row and key/value head, over a chunk of its places. asked: [count, H], scaled.
  // weights: [count, kChunk], scores at first. own_keys: [H, own_stride]; own_scores: [kQueries, own_stride].
  struct Piece {
    int64_t row, head, first, count;
    int64_t from, start, to;  // the chunk's first place; the slots that are read, perhaps none
    int64_t own_stride;
    float *asked, *weights, *own_keys, *own_scores;
    Query query[kMost];
  };

  bool run(int64_t at) const {
    Piece piece;
    const int64_t part = at % parts, chunk = at / parts % chunks;
    piece.head = at / parts / chunks % kv_heads, piece.row = at / parts / chunks / kv_heads;
    const int64_t all = ceiling(length(piece.row) + own, kChunk);
    if (chunk >= all) return true;
    piece.first = queries() * part / parts, piece.count = queries() * (part + 1) / parts - piece.first;
    piece.from = chunk * kChunk, piece.to = least(length(piece.row), piece.from + kChunk);
    piece.own_stride = ceiling(own, lanes) * lanes;
    static thread_local Room room;
    piece.asked = room.of(piece.count * (width + kChunk) + (width + kQueries) * piece.own_stride);
    if (!piece.asked) return false;
    piece.weights = piece.asked + piece.count * width;
    piece.own_keys = piece.weights + piece.count * kChunk;
    piece.own_scores = piece.own_keys + width * piece.own_stride;
    begin(piece, chunk);
    const bool last = length(piece.row) < piece.from + kChunk;
    score_slots(piece);
    if (last) score_own(piece);
    for (int64_t x = 0; x < piece.count; ++x) weigh(piece.query[x], piece.weights + x * kChunk, piece.from);
    add_slots(piece);
    if (last) add_own(piece);
    std::atomic<int64_t>& count = ended[(piece.row * kv_heads + piece.head) * parts + part];
    if (count.fetch_add(1, std::memory_order_acq_rel) + 1 == all)
      for (int64_t x = 0; x < piece.count; ++x) merge(piece.row, piece.head, piece.first + x, all);
    return true;
  }

  void begin(Piece& piece, int64_t chunk) const {
    const int64_t slots_end = length(piece.row), chunk_end = piece.from + kChunk;
    const float scale = 1.0f / sqrtf(static_cast<float>(width));
    piece.start = piece.to;
    for (int64_t x = 0; x < piece.count; ++x) {
      const int64_t at = piece.first + x, token = at / group();
      Query& query = piece.query[x];
      query.sees = mask + ((mask_rows == 1 ? 0 : piece.row) * tokens + token) * own;
      query.begin = std::max(piece.from, oldest ? least(oldest[piece.row * tokens + token], slots_end) : 0);
      query.end = slots_end;
      for (int64_t r = 0; r < own && query.end < chunk_end; ++r) query.end += query.sees[r];
      query.end = least(query.end, chunk_end);
      piece.start = least(piece.start, query.begin / lanes * lanes);
      query.sums = sums + (((piece.row * kv_heads + piece.head) * queries() + at) * chunks + chunk) * stride();
      const float* const from = q + ((piece.row * tokens + token) * heads + piece.head * group() + at % group()) * width;
      for (int64_t h = 0; h < width; ++h) piece.asked[x * width + h] = from[h] * scale;
      for (int64_t h = 0; h < width; ++h) query.sums[h] = 0;
    }
  }

  // Keys or values that are asked for while others are worked on: `width` runs of kSpan numbers. Null where there are none.
  struct Span {
    const float* at;
    int64_t stride;
  };

  Span keys_of(const Piece& piece, int64_t slot) const {
    return {k_cache + (piece.row * kv_heads + piece.head) * width * slots + slot, slots};
  }
  Span values_of(const Piece& piece, int64_t slot) const {
    return {v_cache + ((piece.row * kv_heads + piece.head) * slots + slot) * width, kSpan};
  }

  // Calls `take(n, x, lines, next)` for blocks of n queries, from x on, that are together the piece's. What is next is divided among the
  // blocks: each asks for so many lines of every run, the first of them at `next`. A block alone waits for memory as it is.
  template <typename Take>
  static void in_blocks(const Piece& piece, Span next, Take take) {
    const int64_t blocks = ceiling(piece.count, kQueries);
    constexpr int kHalf = (kLines + 1) / 2;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = piece.count * b / blocks, lines = next.at == nullptr || blocks == 1 ? 0 : blocks < kLines ? kHalf : 1;
      const Span share = {next.at + b * lines * (kLine / sizeof(float)), next.stride};
      with_count<kQueries>(piece.count * (b + 1) / blocks - first, [&](auto count) {
        if (lines == 0 || b * lines >= kLines) return take(count, first, std::integral_constant<int, 0>(), share);
        if (lines == 1) return take(count, first, std::integral_constant<int, 1>(), share);
        take(count, first, std::integral_constant<int, kHalf>(), share);
      });
    }
  }

  template <int most, typename Take>
  static void with_count(int64_t count, const Take& take) {
    if constexpr (most > 1) {
      if (count < most) return with_count<most - 1>(count, take);
    }
    take(std::integral_constant<int, most>());
  }

  // Scores of slots; some that nobody sees with them, whose numbers are not used.
  void score_slots(const Piece& piece) const {
    const float* const keys = keys_of(piece, 0).at;
    float* const rest = piece.own_keys;
    for (int64_t s = piece.start, taken; s < piece.to; s += taken) {
      taken = s + kSpan <= slots ? kSpan : lanes;
      // Less than a vector is left: with others beside them, for a score's bits may not depend on where the cache ends.
      for (int64_t h = 0; h < width && s + lanes > slots; ++h)
        for (int64_t i = 0; i < lanes; ++i) rest[h * lanes + i] = keys[h * slots + least(s + i, slots - 1)];
      const Span next = s + taken < piece.to ? keys_of(piece, s + taken) : values_of(piece, piece.start);
      in_blocks(piece, taken == kSpan ? next : Span{}, [&](auto count, int64_t x, auto lines, Span next) {
        const float* const asked = piece.asked + x * width;
        float* const scores = piece.weights + x * kChunk + s - piece.from;
        if (taken == kSpan) return score<count, kBlock, lines>(asked, keys + s, slots, scores, kChunk, next);
        score<count, 1>(asked, s + lanes <= slots ? keys + s : rest, s + lanes <= slots ? slots : lanes, scores, kChunk);
      });
    }
  }

  // Scores of own keys, at the places that follow the slots for those that see them.
  void score_own(const Piece& piece) const {
    const int64_t wide = piece.own_stride;
    for (int64_t r = 0; r < wide; ++r) {
      const float* const key = k + ((piece.row * own + (r < own ? r : 0)) * kv_heads + piece.head) * width;
      for (int64_t h = 0; h < width; ++h) piece.own_keys[h * wide + r] = key[h];
    }
    in_blocks(piece, {}, [&](auto count, int64_t x, auto, Span) {
      for (int64_t r = 0; r < wide; r += lanes)
        score<count, 1>(piece.asked + x * width, piece.own_keys + r, wide, piece.own_scores + r, wide);
      for (int i = 0; i < count; ++i) {
        const float* const scores = piece.own_scores + i * wide;
        own_places(piece, piece.query[x + i], [&](int64_t r, int64_t place) { piece.weights[(x + i) * kChunk + place] = scores[r]; });
      }
    });
  }

  // Calls `take(r, place)` for the own keys that a query sees in this chunk, `place` counted from its first.
  template <typename Take>
  void own_places(const Piece& piece, const Query& query, Take take) const {
    int64_t place = length(piece.row) - piece.from;
    for (int64_t r = 0; r < own && place < kChunk; ++r)
      if (query.sees[r]) {
        if (place >= 0) take(r, place);
        ++place;
      }
  }

  // Sums of keys over the head's width, one after the other, for `vectors` vectors of keys.
  template <int count, int vectors, int lines = 0>
  void score(const float* asked, const float* keys, int64_t key_stride, float* scores, int64_t stride, Span next = {}) const {
    Floats sum[count][vectors];
    UNROLLED for (int x = 0; x < count; ++x) {
      UNROLLED for (int i = 0; i < vectors; ++i) sum[x][i] = Floats{};
    }
    for (int64_t h = 0; h < width; ++h) {
      ask<lines>(next, h);
      UNROLLED for (int i = 0; i < vectors; ++i) {
        const Floats key = load<lanes>(keys + h * key_stride + i * lanes);
        UNROLLED for (int x = 0; x < count; ++x) sum[x][i] = fused<lanes>(asked[x * width + h] - Floats{}, key, sum[x][i]);
      }
    }
    UNROLLED for (int x = 0; x < count; ++x) {
      UNROLLED for (int i = 0; i < vectors; ++i) store<lanes>(scores + x * stride + i * lanes, sum[x][i]);
    }
  }

  template <int lines>
  static void ask(Span next, int64_t run) {
    UNROLLED for (int n = 0; n < lines; ++n) __builtin_prefetch(reinterpret_cast<const char*>(next.at + run * next.stride) + n * kLine);
  }

  // Scores become weights; what the query does not read becomes 0, up to whole vectors.
  void weigh(const Query& query, float* scores, int64_t from) const {
    const int32_t begin = static_cast<int32_t>(query.begin - from), end = static_cast<int32_t>(query.end - from);
    Ints place;
    for (int i = 0; i < lanes; ++i) place[i] = i;
    const auto seen = [&](int32_t i, Floats value, float otherwise) {
      return begin <= i && i + lanes <= end ? value : (place + i >= begin) & (place + i < end) ? value : Floats{} + otherwise;
    };
    Floats peaks = Floats{} - INFINITY, weights = {};
    for (int32_t i = begin / lanes * lanes; i < end; i += lanes) {
      const Floats some = seen(i, load<lanes>(scores + i), -INFINITY);
      peaks = some > peaks ? some : peaks;
    }
    for (int n = lanes / 2; n > 0; n /= 2)
      for (int i = 0; i < n; ++i) peaks[i] = peaks[i + n] > peaks[i] ? peaks[i + n] : peaks[i];
    const float peak = peaks[0];
    for (int32_t i = begin / lanes * lanes; i < end; i += lanes) {
      const Floats some = seen(i, exponential<lanes>(load<lanes>(scores + i) - peak), 0);
      store<lanes>(scores + i, some);
      weights += some;
    }
    store<lanes>(query.sums + width, weights);
    query.sums[width + lanes] = peak;
    query.sums[width + lanes + 1] = begin < end;
  }

  // Adds the values of slots by weight, in their order.
  void add_slots(const Piece& piece) const {
    const float* const values = values_of(piece, 0).at;
    for (int64_t from = piece.start; from < piece.to; from += kSpan) {
      const int64_t to = least(piece.to, from + kSpan);
      in_blocks(piece, to < piece.to ? values_of(piece, to) : Span{}, [&](auto count, int64_t x, auto lines, Span next) {
        const Query* const some = piece.query + x;
        const float* const weights = piece.weights + x * kChunk - piece.from;
        // Slots that not all see, then those that all do.
        int64_t common = from;
        for (int i = 0; i < count; ++i) common = std::max(common, some[i].begin);
        for (int i = 0; i < count; ++i) add<1>(weights + i * kChunk, values, std::max(some[i].begin, from), least(common, to), some + i);
        add<count, lines>(weights, values, common, to, some, next);
      });
    }
  }

  void add_own(const Piece& piece) const {
    for (int64_t x = 0; x < piece.count; ++x) {
      own_places(piece, piece.query[x], [&](int64_t r, int64_t place) {
        const float* const value = v + ((piece.row * own + r) * kv_heads + piece.head) * width;
        add<1>(piece.weights + x * kChunk + place, value, 0, 1, piece.query + x);
      });
    }
  }

  // Adds the values of places `from` to `to` by weight; kBlock vectors of the width at once, or fewer one by one.
  template <int count, int lines = 0>
  void add(const float* weights, const float* values, int64_t from, int64_t to, const Query* query, Span next = {}) const {
    if (from >= to) return;
    int64_t h = 0;
    for (; h + kSpan <= width; h += kSpan, next.at += kSpan * next.stride)
      add_vectors<count, kBlock, lines>(weights, values, from, to, query, h, next);
    for (; h < width; h += lanes) add_vectors<count, 1>(weights, values, from, to, query, h);
  }

  template <int count, int vectors, int lines = 0>
  void add_vectors(const float* weights, const float* values, int64_t from, int64_t to, const Query* query, int64_t h,
                   Span next = {}) const {
    Floats sum[count][vectors];
    UNROLLED for (int x = 0; x < count; ++x) {
      UNROLLED for (int i = 0; i < vectors; ++i) sum[x][i] = load<lanes>(query[x].sums + h + i * lanes);
    }
    for (int64_t s = from; s < to; ++s) {
      ask<lines>(next, s - from);
      UNROLLED for (int i = 0; i < vectors; ++i) {
        const Floats value = load<lanes>(values + s * width + h + i * lanes);
        UNROLLED for (int x = 0; x < count; ++x) sum[x][i] = fused<lanes>(weights[x * kChunk + s] - Floats{}, value, sum[x][i]);
      }
    }
    UNROLLED for (int x = 0; x < count; ++x) {
      UNROLLED for (int i = 0; i < vectors; ++i) store<lanes>(query[x].sums + h + i * lanes, sum[x][i]);
    }
  }

  // One query's result, of what its row's chunks gave.
  void merge(int64_t row, int64_t head, int64_t at, int64_t whole) const {
    const float* const from = sums + ((row * kv_heads + head) * queries() + at) * chunks * stride();
    float* const to = out + ((row * tokens + at / group()) * heads + head * group() + at % group()) * width;
    float peak = -INFINITY;
    for (int64_t c = 0; c < whole; ++c) {
      const float* const part = from + c * stride() + width + lanes;
      if (part[1] != 0) peak = part[0] > peak ? part[0] : peak;
    }
    Floats weights = {};
    for (int64_t h = 0; h < width; ++h) to[h] = 0;
    for (int64_t c = 0; c < whole; ++c) {
      const float* const part = from + c * stride();
      if (part[width + lanes + 1] == 0) continue;
      const Floats share = exponential<lanes>(Floats{} + (part[width + lanes] - peak));
      weights += share * load<lanes>(part + width);
      for (int64_t h = 0; h < width; h += lanes) store<lanes>(to + h, load<lanes>(to + h) + share * load<lanes>(part + h));
    }
    float total = 0;
    for (int i = 0; i < lanes; ++i) total += weights[i];
    for (int64_t h = 0; h < width && total != 0; h += lanes) store<lanes>(to + h, load<lanes>(to + h) / total);
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
  if (!work.prepare(threads_of(frame))) return refuse(frame, kNoMemory, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
  return share(frame, work, work.pieces());
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
