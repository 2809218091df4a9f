// Flash attention on a CPU, in float32 (Dao et al. 2022; the backward pass by tiles of queries, five products each).
//
// Queries are in the lanes of vector registers: scores are stored as [key][query], so that maxima, sums and the merge of
// blocks go lane by lane, and keys and values are read one number at a time for all queries of a tile. All seven
// products are one function, `multiply`, which holds a block of results in registers. Several tiles of queries share a
// copy of a block of keys and values: rows of one head often have a distance of a power of two, so caches hold few of them.
//
// QUERIES, KEYS, FORWARD_TILES and BACKWARD_TILES are defined by flash.py, which makes room by them.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;  // of 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2;  // of 16 registers
#else
constexpr int LANES = 4, VECTORS = 4;  // of 32 registers (NEON)
#endif
static_assert(QUERIES % (LANES * VECTORS) == 0, "a tile of queries is whole panels");

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.693147180559945309417f;

Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
Floats all(float x) { return x - Floats{}; }

// ---- Numbers of 16 bits ------------------------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

Floats widened(Bits x, BFloat16) { return (Floats)(x << 16); }
Floats widened(Bits x, Float16) {
  const Bits magnitude = (x & 0x7fff) << 13;
  // A multiplication moves the exponent of denormal numbers, too.
  const Bits finite = (Bits)((Floats)magnitude * 0x1p112f);
  return (Floats)((magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000 : finite) | (x & 0x8000) << 16);
}

template <class T>
Floats load(const T* p) {
  Halves x;
  std::memcpy(&x, p, sizeof x);
  return widened(__builtin_convertvector(x, Bits), T{});
}
float one(const float* p) { return *p; }
template <class T>
float one(const T* p) {
  return widened(Bits{} + p->bits, T{})[0];
}

// ---- Exponentials ------------------------------------------------------------------------------------------------

// 2^x for x up to 128, where it is infinite, to rounding; 0 below 2^-126. NaN stays NaN.
Floats exp2(Floats x) {
  const Floats held = x < -127.f ? all(-127.f) : x;
  const Floats shifted = held + 0x1.8p23f;  // its last bits are the nearest integer
  const Floats f = held - (shifted - 0x1.8p23f);
  // The polynomial of least error, 2e-9, on -1/2 to 1/2, where it is 1 at 0.
  Floats p = all(1.5353343473248647e-4f);
  p = p * f + 1.3398867983469565e-3f;
  p = p * f + 9.618437366778962e-3f;
  p = p * f + 5.55033248671647e-2f;
  p = p * f + 2.402264791400914e-1f;
  p = p * f + 6.931472028483353e-1f;
  p = p * f + 1.f;
  const Ints scaled = (Ints)p + ((Ints)shifted << 23);
  return x >= -126.f ? (Floats)scaled : held * 0.f;
}

// To rounding: a polynomial (Cephes) near 0, where 1 - 2 / (e^2x + 1) cancels.
Floats tanh(Floats x) {
  const Floats size = x < 0.f ? -x : x, z = x * x;
  Floats p = all(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Floats near = p * z * x + x, held = size > 10.f ? all(10.f) : size;
  const Floats far = 1.f - 2.f / (exp2(held * (2 * LOG2_E)) + 1.f);
  // NaN stays NaN.
  return size < 0.625f ? near : (x < 0.f ? -far : x > 0.f ? far : x);
}

// ---- Products ----------------------------------------------------------------------------------------------------

enum class Into { set, add, scale_and_add };

// a[m, k] is at m * row + k * step: a matrix, or its transpose.
struct Left {
  const float* at;
  int64_t row, step;
  Left from(int64_t m) const { return {at + m * row, row, step}; }
};
struct Rows {
  float* at;
  int64_t row;
};

// c[m][n] = sum over k of a[m, k] b[k][n], for M rows and N vectors of columns. Sums begin at zero and are then added
// to what is there, which is more exact than one long sum.
template <int M, int N>
void block(Into into, int K, Left a, Rows b, Rows c, const float* factors) {
  Floats sums[M][N] = {};
  for (int k = 0; k < K; ++k) {
    Floats columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = load(b.at + k * b.row + n * LANES);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const Floats x = all(a.at[m * a.row + k * a.step]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] += x * columns[n];
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* p = c.at + m * c.row + n * LANES;
      if (into == Into::add) sums[m][n] += load(p);
      if (into == Into::scale_and_add) sums[m][n] += load(p) * load(factors + n * LANES);
      store(p, sums[m][n]);
    }
  }
}

// Rows whose sums fit into registers together with N vectors of columns.
constexpr int rows_beside(int n) { return VECTORS == 2 ? (n == 2 ? 6 : 12) : n == 4 ? 6 : n == 3 ? 8 : 12; }

template <int N, int M>
void last_rows(int rows, Into into, int K, Left a, Rows b, Rows c, const float* factors) {
  if constexpr (M > 0) {
    if (rows == M) return block<M, N>(into, K, a, b, c, factors);
    last_rows<N, M - 1>(rows, into, K, a, b, c, factors);
  }
}

template <int N>
void panel(Into into, int M, int K, Left a, Rows b, Rows c, const float* factors) {
  constexpr int ROWS = rows_beside(N);
  int m = 0;
  for (; m + ROWS <= M; m += ROWS) block<ROWS, N>(into, K, a.from(m), b, {c.at + m * c.row, c.row}, factors);
  last_rows<N, ROWS - 1>(M - m, into, K, a.from(m), b, {c.at + m * c.row, c.row}, factors);
}

// The same for any number of rows, and of vectors of columns. `factors`: of the columns, for what is there.
void multiply(Into into, int M, int vectors, int K, Left a, Rows b, Rows c, const float* factors = nullptr) {
  for (int n = 0; n < vectors; n += VECTORS) {
    const int at = n * LANES;
    const Rows right{b.at + at, b.row}, result{c.at + at, c.row};
    const float* of_columns = factors ? factors + at : nullptr;
    switch (std::min(VECTORS, vectors - n)) {
      case 1:
        panel<1>(into, M, K, a, right, result, of_columns);
        break;
      case 2:
        panel<2>(into, M, K, a, right, result, of_columns);
        break;
      case 3:
        if constexpr (VECTORS > 2) panel<3>(into, M, K, a, right, result, of_columns);
        break;
      case 4:
        if constexpr (VECTORS > 2) panel<4>(into, M, K, a, right, result, of_columns);
        break;
    }
  }
}

// ---- Rows to columns ---------------------------------------------------------------------------------------------

template <size_t... I>
Floats shuffled(Floats a, Floats b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Ints{(int32_t)I...});
#endif
}
// Of two rows: lanes without a bit stay where they are, and those with it take what the other row has.
template <int BIT, size_t... I>
Floats lower(Floats a, Floats b, std::index_sequence<I...>) {
  return shuffled(a, b, std::index_sequence<(I & BIT ? LANES + I - BIT : I)...>{});
}
template <int BIT, size_t... I>
Floats upper(Floats a, Floats b, std::index_sequence<I...>) {
  return shuffled(a, b, std::index_sequence<(I & BIT ? LANES + I : I + BIT)...>{});
}

template <int BIT = 1>
void turn_over(Floats (&x)[LANES]) {
  if constexpr (BIT < LANES) {
    constexpr auto lanes = std::make_index_sequence<LANES>{};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      if (i & BIT) continue;
      const Floats a = x[i], b = x[i + BIT];
      x[i] = lower<BIT>(a, b, lanes);
      x[i + BIT] = upper<BIT>(a, b, lanes);
    }
    turn_over<2 * BIT>(x);
  }
}

// columns[d][r] = factor * rows[r][d]; queries behind the last one of a vector are zeros.
template <class T>
void to_columns(const T* rows, int64_t stride, int count, int D, float factor, float* columns) {
  for (int r = 0; r < count; r += LANES) {
    int d = 0;
    for (; d + LANES <= D; d += LANES) {
      Floats x[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = r + i < count ? load(rows + (r + i) * stride + d) * factor : Floats{};
      turn_over(x);
      for (int i = 0; i < LANES; ++i) store(columns + (d + i) * QUERIES + r, x[i]);
    }
    for (; d < D; ++d)
      for (int i = 0; i < LANES; ++i)
        columns[d * QUERIES + r + i] = r + i < count ? one(rows + (r + i) * stride + d) * factor : 0;
  }
}

// rows[r][d] = columns[d][r] * factors[r], added to what is there or put in its place
void to_rows(const float* columns, const float* factors, int count, int D, float* rows, int64_t stride, bool add) {
  for (int r = 0; r < count; r += LANES) {
    int d = 0;
    for (; d + LANES <= D; d += LANES) {
      Floats x[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = load(columns + (d + i) * QUERIES + r) * load(factors + r);
      turn_over(x);
      for (int i = 0; i < LANES && r + i < count; ++i) {
        float* p = rows + (r + i) * stride + d;
        store(p, add ? load(p) + x[i] : x[i]);
      }
    }
    for (; d < D; ++d)
      for (int i = 0; i < LANES && r + i < count; ++i) {
        float* p = rows + (r + i) * stride + d;
        *p = (add ? *p : 0) + columns[d * QUERIES + r + i] * factors[r + i];
      }
  }
}

// A copy in rows of `width` numbers, zeros behind the D-th.
template <class T>
void copy_rows(const T* from, int64_t stride, int count, int D, float factor, float* to, int width) {
  for (int r = 0; r < count; ++r) {
    const T* row = from + r * stride;
    int d = 0;
    for (; d + LANES <= D; d += LANES) store(to + r * width + d, load(row + d) * factor);
    for (; d < width; ++d) to[r * width + d] = d < D ? one(row + d) * factor : 0;
  }
}

// A row in vectors of any width.
int whole_vectors(int D) { return (D + 15) / 16 * 16; }

// Rows of `width` numbers, of which the first D are added to what is there or put in its place.
void put_rows(const float* from, int width, int64_t count, int D, float* to, int64_t stride, bool add) {
  for (int64_t r = 0; r < count; ++r) {
    const float* row = from + r * width;
    float* p = to + r * stride;
    int d = 0;
    for (; d + LANES <= D; d += LANES) store(p + d, add ? load(p + d) + load(row + d) : load(row + d));
    for (; d < D; ++d) p[d] = (add ? p[d] : 0) + row[d];
  }
}

// ---- What queries see --------------------------------------------------------------------------------------------

// A query at p sees keys p - left to p + right; -1 is unbounded.
struct Band {
  int64_t left, right;
  int64_t begin(int64_t p) const { return left < 0 ? 0 : std::max<int64_t>(0, p - left); }
  int64_t end(int64_t p, int64_t keys) const { return right < 0 ? keys : std::min(keys, p + right + 1); }
};

// Keys, from one to before another.
struct Range {
  int64_t begin, end;
};

// Rows that single keys are hidden from: `count` ranges of them for each key, first all begins, then all ends.
struct Hidden {
  const int32_t* data;
  int64_t count, keys;
  const int32_t* begins(int64_t range) const { return data + 2 * range * keys; }
  const int32_t* ends(int64_t range) const { return begins(range) + keys; }
};

// Queries of one head: from row `first`, at the position of key `at`.
struct Tile {
  int64_t first, at;
  int count;

  int64_t last() const { return at + count - 1; }
  int vectors() const { return (count + LANES - 1) / LANES; }
  bool sees(const Band& band, int64_t key, int n, int64_t keys) const {
    return key < band.end(last(), keys) && key + n > band.begin(at);
  }
  bool misses(const Band& band, int64_t key, int n, int64_t keys) const {
    return key + n > band.end(at, keys) || key < band.begin(last());
  }
  // Scores [n][QUERIES] of keys that a query does not see become -inf.
  void hide(const Band& band, int64_t key, int n, float* scores) const {
    constexpr int64_t FAR = 1 << 30;
    for (int m = 0; m < n; ++m) {
      const int64_t ahead = key + m - at;  // of the first query; lane i sees it if ahead - right <= i <= ahead + left
      const int32_t low = band.right < 0 ? 0 : (int32_t)std::clamp<int64_t>(ahead - band.right, 0, FAR);
      const int32_t high = band.left < 0 ? FAR : (int32_t)std::clamp<int64_t>(ahead + band.left, -1, FAR);
      for (int x = 0; x < vectors(); ++x) {
        Ints lane;
        for (int i = 0; i < LANES; ++i) lane[i] = x * LANES + i;
        float* p = scores + m * QUERIES + x * LANES;
        store(p, ((lane < low) | (lane > high)) ? all(-INFINITY) : load(p));
      }
    }
  }
  void hide(const Hidden& hidden, int64_t key, int n, float* scores) const {
    for (int64_t range = 0; range < hidden.count; ++range) {
      const int32_t *begins = hidden.begins(range) + key, *ends = hidden.ends(range) + key;
      for (int m = 0; m < n; ++m) {
        const int64_t begin = std::max<int64_t>(begins[m] - first, 0), end = std::min<int64_t>(ends[m] - first, count);
        if (begin < end) std::fill(scores + m * QUERIES + begin, scores + m * QUERIES + end, -INFINITY);
      }
    }
  }
};

// ---- Arguments of a call -----------------------------------------------------------------------------------------

// GOMP_parallel of the OpenMP library that torch runs on: its threads exist already, and wait for work in a loop, so
// further threads would have to share cores with them.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

struct Call {
  int64_t batch, heads, key_heads, queries, keys, head_dim;
  int64_t first_at;  // the key at the first query's position
  Band band;
  // Queries see keys block by block: block i of all lists sees the ranges from spans[i] to before spans[i + 1].
  // Successive heads share a list. Or null: all keys.
  int64_t block, heads_of_list;
  const int64_t* spans;
  const Range* ranges;
  Hidden hidden;
  float scale, log_count;  // of how often each key counts
  float softcap;           // scores s become softcap * tanh(s / softcap), unless it is 0
  int32_t threads, onto;   // onto: results are merged with, gradients added to what is there
  float* room;  // `of_thread` numbers for each thread, and behind them the partial results of few queries
  int64_t of_thread;
  Parallel parallel;  // or null
  int64_t parts;  // of the keys, if queries are few; else 0

  int64_t group() const { return heads / key_heads; }
  int64_t few() const { return group() * queries; }  // rows that share keys, if queries are few
  int64_t blocks() const { return (queries + block - 1) / block; }
};

// Queries of a block, `rows` at most: what an item of work is in the forward pass, and part of one in the backward.
struct Group {
  int64_t first, end;
  const Range *ranges, *ranges_end;

  int tiles() const { return (int)((end - first + QUERIES - 1) / QUERIES); }
  Tile tile(const Call& call, int t) const {
    const int64_t row = first + t * QUERIES;
    return {row, row + call.first_at, (int)std::min<int64_t>(QUERIES, end - row)};
  }
};

struct Groups {
  const Call& call;
  int64_t rows, of_block;
  Range all;
  Groups(const Call& call, int64_t rows)
      : call(call), rows(rows), of_block((call.block + rows - 1) / rows), all{0, call.keys} {}

  int64_t count() const { return call.blocks() * of_block; }
  // Of a head; those behind the last query are empty.
  Group group(int64_t h, int64_t i) const {
    const int64_t block = i / of_block, first = block * call.block + i % of_block * rows;
    Group found{first, std::min({first + rows, (block + 1) * call.block, call.queries}), &all, &all + 1};
    if (call.spans) {
      const int64_t* span = call.spans + h / call.heads_of_list * call.blocks() + block;
      found.ranges = call.ranges + span[0];
      found.ranges_end = call.ranges + span[1];
    }
    return found;
  }
};

// work(key, n) for the keys that some of these tiles of a group may see, n at a time.
template <class T, class Work>
void over_keys(const Call& call, const Group& group, const std::vector<T>& tiles, Work work) {
  const Tile &first = tiles[0].tile, &last = tiles[group.tiles() - 1].tile;
  for (const Range* range = group.ranges; range < group.ranges_end; ++range) {
    const int64_t end = std::min(range->end, call.band.end(last.last(), call.keys));
    for (int64_t key = std::max(range->begin, call.band.begin(first.at)); key < end; key += KEYS)
      work(key, (int)std::min<int64_t>(KEYS, end - key));
  }
}

template <class T>
struct Operand {  // [batch, rows, heads, head_dim], the last one contiguous
  T* data;
  int64_t batch, head, row;
  T* at(int64_t b, int64_t h, int64_t r) const { return data + b * batch + h * head + r * row; }
};

struct Lse {  // [batch, heads, rows]; the batch may have two axes, `inner` items on the second
  float* data;
  int64_t outer, inner, batch, head, row;
  float* at(int64_t b, int64_t h, int64_t r) const {
    return data + b / inner * outer + b % inner * batch + h * head + r * row;
  }
};

class Room {  // of one thread, in memory lines
 public:
  explicit Room(float* begin) : begin(begin), next(begin) {}
  float* take(int64_t floats) {
    float* taken = next;
    next += (floats + 15) / 16 * 16;
    return taken;
  }
  int64_t taken() const { return next - begin; }

 private:
  float *begin, *next;
};

// work(room, next) in every thread; next() is the number of an item that none has begun, or -1.
template <class Work>
void in_threads(const Call& call, int64_t items, Work work) {
  std::atomic<int64_t> begun{0};
  std::atomic<int> seats{0};
  const int threads = (int)std::min<int64_t>(call.threads, items);
  auto worker = [&] {
    const int seat = seats++;
    if (seat >= threads) return;
    work(Room(call.room + seat * call.of_thread), [&] {
      const int64_t item = begun++;
      return item < items ? item : -1;
    });
  };
  if (threads <= 1) return worker();
  // All of its threads: a library that uses fewer ends the others, and starts them again in the next call.
  if (call.parallel) return call.parallel([](void* w) { (*(decltype(worker)*)w)(); }, &worker, 0, 0);
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(worker);
  worker();
  for (auto& other : others) other.join();
}

// ---- Forward -----------------------------------------------------------------------------------------------------

struct ForwardTile {
  float *q, *out, *max, *sum;  // q, out [D][QUERIES], the others [QUERIES]
  Tile tile{};
  ForwardTile(Room& room, int D)
      : q(room.take(D * QUERIES)), out(room.take(D * QUERIES)), max(room.take(QUERIES)), sum(room.take(QUERIES)) {}
};

struct ForwardRoom {
  std::vector<ForwardTile> tiles;
  float *keys, *values, *scores, *factors;
  ForwardRoom(Room& room, int D) {
    for (int t = 0; t < FORWARD_TILES; ++t) tiles.emplace_back(room, D);
    keys = room.take(KEYS * D), values = room.take(KEYS * D);
    scores = room.take(KEYS * QUERIES), factors = room.take(QUERIES);
  }
};

// Scores [n][QUERIES], times log2(e), are capped; slopes are the derivatives, or null.
void cap(float softcap, int n, int vectors, float* scores, float* slopes) {
  const float unit = softcap * LOG2_E;
  for (int m = 0; m < n; ++m)
    for (int x = 0; x < vectors; ++x) {
      const int at = m * QUERIES + x * LANES;
      const Floats t = tanh(load(scores + at) * (1.f / unit));
      store(scores + at, t * unit);
      if (slopes) store(slopes + at, 1.f - t * t);
    }
}

void begin(ForwardTile& s, int D) {
  std::fill_n(s.out, D * QUERIES, 0.f);
  std::fill_n(s.max, QUERIES, -INFINITY);
  std::fill_n(s.sum, QUERIES, 0.f);
}

// Scores [n][QUERIES] become weights against a new maximum; factors are what older sums have to be multiplied by.
void weigh(ForwardTile& s, int n, float* scores, float* factors) {
  for (int x = 0; x < s.tile.vectors(); ++x) {
    const int at = x * LANES;
    const Floats before = load(s.max + at);
    Floats max = before, sum = {};
    for (int m = 0; m < n; ++m) {
      const Floats score = load(scores + m * QUERIES + at);
      max = score > max ? score : max;
    }
    const Floats against = max == -INFINITY ? Floats{} : max;
    for (int m = 0; m < n; ++m) {
      const Floats weight = exp2(load(scores + m * QUERIES + at) - against);
      sum += weight;
      store(scores + m * QUERIES + at, weight);
    }
    const Floats factor = exp2(before - against);
    store(s.max + at, max);
    store(s.sum + at, load(s.sum + at) * factor + sum);
    store(factors + at, factor);
  }
}

template <class T>
void forward(const Call& call, Operand<const T> q, Operand<const T> k, Operand<const T> v, Operand<float> out,
             Lse lse) {
  const int D = (int)call.head_dim;
  // Fewer tiles share copies of keys where threads would have nothing to do.
  int64_t span = QUERIES * FORWARD_TILES;
  while (span > QUERIES && call.batch * call.heads * Groups(call, span).count() < 2 * call.threads) span /= 2;
  const Groups groups(call, span);
  const int64_t count = groups.count();
  in_threads(call, call.batch * call.heads * count, [&](Room space, auto next) {
    ForwardRoom room(space, D);
    for (int64_t item; (item = next()) >= 0;) {
      // Heads one after another, of each the last queries first: under a causal mask they see the most.
      const int64_t b = item / count / call.heads, h = item / count % call.heads, kh = h / call.group();
      const Group group = groups.group(h, count - 1 - item % count);
      const int tiles = group.tiles();
      if (tiles <= 0) continue;
      for (int t = 0; t < tiles; ++t) {
        ForwardTile& s = room.tiles[t];
        s.tile = group.tile(call, t);
        begin(s, D);
        to_columns(q.at(b, h, s.tile.first), q.row, s.tile.count, D, call.scale * LOG2_E, s.q);
        if (!call.onto) continue;
        // What is there is as one more key that counts once.
        to_columns(out.at(b, h, s.tile.first), out.row, s.tile.count, D, 1.f, s.out);
        const float* of_rows = lse.at(b, h, s.tile.first);
        for (int r = 0; r < s.tile.count; ++r) {
          s.max[r] = (of_rows[r * lse.row] - call.log_count) * LOG2_E;
          s.sum[r] = s.max[r] == -INFINITY ? 0 : 1;
        }
      }
      over_keys(call, group, room.tiles, [&](int64_t key, int n) {
        copy_rows(k.at(b, kh, key), k.row, n, D, 1.f, room.keys, D);
        copy_rows(v.at(b, kh, key), v.row, n, D, 1.f, room.values, D);
        for (int t = 0; t < tiles; ++t) {
          ForwardTile& s = room.tiles[t];
          if (!s.tile.sees(call.band, key, n, call.keys)) continue;
          const int vectors = s.tile.vectors();
          const Rows scores{room.scores, QUERIES};
          multiply(Into::set, n, vectors, D, {room.keys, D, 1}, {s.q, QUERIES}, scores);
          if (call.softcap > 0) cap(call.softcap, n, vectors, room.scores, nullptr);
          if (s.tile.misses(call.band, key, n, call.keys)) s.tile.hide(call.band, key, n, room.scores);
          s.tile.hide(call.hidden, key, n, room.scores);
          weigh(s, n, room.scores, room.factors);
          multiply(Into::scale_and_add, D, vectors, n, {room.values, 1, D}, scores, {s.out, QUERIES}, room.factors);
        }
      });
      for (int t = 0; t < tiles; ++t) {
        ForwardTile& s = room.tiles[t];
        float* of_rows = lse.at(b, h, s.tile.first);
        for (int r = 0; r < s.tile.count; ++r) {
          of_rows[r * lse.row] = (s.max[r] + std::log2(s.sum[r])) * LN_2 + call.log_count;
          room.factors[r] = s.sum[r] == 0 ? 0 : 1 / s.sum[r];
        }
        to_rows(s.out, room.factors, s.tile.count, D, out.at(b, h, s.tile.first), out.row, false);
      }
    }
  });
}

// ---- Forward of few queries ---------------------------------------------------------------------------------------
//
// The rows that share a head of keys are computed together, and an item is a part of the keys with all heads, because
// the keys of a token often follow each other in memory. Scores have keys in the lanes, results have channels. Parts are
// merged at the end.

// A row of few queries while it is computed: its result in whole vectors, then BEHIND_ROW numbers, of which the first
// are the maximum and the sum of its weights.
constexpr int LINE = 64;  // bytes of a cache

struct FewRoom {
  float *q, *keys, *values, *scores;  // [all rows][width], [KEYS][width] twice, [rows][KEYS]
  FewRoom(Room& room, int64_t heads, int64_t rows, int width)
      : q(room.take(heads * rows * width)), keys(room.take(KEYS * width)), values(room.take(KEYS * width)),
        scores(room.take(rows * KEYS)) {}
};

// Rows of whole vectors in float32: as they are, or a copy.
template <class T>
Left whole_rows(const T* from, int64_t stride, int n, int D, int width, float* to) {
  if constexpr (std::is_same_v<T, float>)
    if (D == width) return {from, stride, 1};
  copy_rows(from, stride, n, D, 1.f, to, width);
  return {to, width, 1};
}

// scores[key] of one row with n keys.
void score(const float* q, Left keys, int n, int width, float* scores) {
  for (int m = 0; m < n; m += LANES) {
    Floats x[LANES];
    for (int i = 0; i < LANES; ++i) {
      const float* key = keys.at + std::min(m + i, n - 1) * keys.row;
      Floats sum = {};
      for (int d = 0; d < width; d += LANES) sum += load(q + d) * load(key + d);
      x[i] = sum;
    }
    turn_over(x);
    for (int i = 1; i < LANES; ++i) x[0] += x[i];
    store(scores + m, x[0]);
  }
}

void cap_row(float softcap, int n, float* scores) {
  const float unit = softcap * LOG2_E;
  for (int m = 0; m < n; m += LANES) store(scores + m, tanh(load(scores + m) * (1.f / unit)) * unit);
}

// Scores of keys from `begin` to before `end` become weights against a new maximum, others 0; returns what older sums
// have to be multiplied by.
float weigh(float* scores, int begin, int end, float* max_and_sum) {
  const float before = max_and_sum[0];
  std::fill_n(scores, begin, -INFINITY);
  std::fill(scores + end, scores + KEYS, -INFINITY);
  Floats maxima = all(before), sums = {};
  for (int m = 0; m < KEYS; m += LANES) {
    const Floats x = load(scores + m);
    maxima = x > maxima ? x : maxima;
  }
  float max = before;
  for (int i = 0; i < LANES; ++i) max = std::max(max, maxima[i]);
  const float against = max == -INFINITY ? 0 : max;
  for (int m = 0; m < KEYS; m += LANES) {
    const Floats weight = exp2(load(scores + m) - against);
    store(scores + m, weight);
    sums += weight;
  }
  const float factor = exp2(all(before - against))[0];
  float sum = max_and_sum[1] * factor;
  for (int i = 0; i < LANES; ++i) sum += sums[i];
  max_and_sum[0] = max, max_and_sum[1] = sum;
  return factor;
}

template <class T>
void forward_of_few(const Call& call, Operand<const T> q, Operand<const T> k, Operand<const T> v, Operand<float> out,
                    Lse lse) {
  const int D = (int)call.head_dim, width = whole_vectors(D), rows = (int)call.few();
  const int64_t of_row = width + BEHIND_ROW, all_rows = call.key_heads * rows;
  float* partial = call.room + call.threads * call.of_thread;
  const int64_t first = call.band.begin(call.first_at);
  const int64_t end = call.band.end(call.first_at + call.queries - 1, call.keys);
  const int64_t of_part = (std::max<int64_t>(end - first, 0) + call.parts - 1) / call.parts;
  const auto head = [&](int64_t r) { return r / rows * call.group() + r % rows / call.queries; };
  in_threads(call, call.batch * call.parts, [&](Room space, auto next) {
    FewRoom room(space, call.key_heads, rows, width);
    for (int64_t item; (item = next()) >= 0;) {
      const int64_t b = item / call.parts, begin = first + item % call.parts * of_part;
      const int64_t stop = std::min(end, begin + of_part);
      float* results = partial + item * all_rows * of_row;
      for (int64_t r = 0; r < all_rows; ++r) {
        copy_rows(q.at(b, head(r), r % call.queries), 0, 1, D, call.scale * LOG2_E, room.q + r * width, width);
        std::fill_n(results + r * of_row, of_row, 0.f);
        results[r * of_row + width] = -INFINITY;
      }
      for (int64_t key = begin; key < stop; key += KEYS) {
        const int n = (int)std::min<int64_t>(KEYS, stop - key);
        for (int64_t kh = 0; kh < call.key_heads; ++kh) {
          // Rows of a head are apart in memory, and processors fetch few of them ahead.
          for (int64_t m = key + KEYS; m < std::min<int64_t>(key + 2 * KEYS, stop); ++m)
            for (int d = 0; d < D; d += LINE / (int)sizeof(T)) {
              __builtin_prefetch(k.at(b, kh, m) + d);
              __builtin_prefetch(v.at(b, kh, m) + d);
            }
          const Left keys = whole_rows(k.at(b, kh, key), k.row, n, D, width, room.keys);
          const Left values = whole_rows(v.at(b, kh, key), v.row, n, D, width, room.values);
          float* of_head = results + kh * rows * of_row;
          for (int r = 0; r < rows; ++r) {
            const int64_t at = call.first_at + r % call.queries;
            const int from = (int)std::clamp<int64_t>(call.band.begin(at) - key, 0, n);
            const int to = (int)std::clamp<int64_t>(call.band.end(at, call.keys) - key, from, n);
            float* row = of_head + r * of_row;
            score(room.q + (kh * rows + r) * width, keys, n, width, room.scores + r * KEYS);
            if (call.softcap > 0) cap_row(call.softcap, n, room.scores + r * KEYS);
            const float factor = weigh(room.scores + r * KEYS, from, to, row + width);
            for (int d = 0; d < width; d += LANES) store(row + d, load(row + d) * factor);
          }
          multiply(Into::add, rows, width / LANES, n, {room.scores, KEYS, 1}, {(float*)values.at, values.row},
                   {of_head, of_row});
        }
      }
    }
  });
  std::vector<float> total(width);
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t r = 0; r < all_rows; ++r) {
      float* to = out.at(b, head(r), r % call.queries);
      float* of_lse = lse.at(b, head(r), 0) + r % call.queries * lse.row;
      const float* part = partial + (b * call.parts * all_rows + r) * of_row;
      const int64_t step = all_rows * of_row;
      // What is there is as one more key that counts once.
      const float there = call.onto ? (*of_lse - call.log_count) * LOG2_E : -INFINITY;
      float max = there, sum = 0;
      for (int64_t p = 0; p < call.parts; ++p) max = std::max(max, part[p * step + width]);
      const float against = max == -INFINITY ? 0 : max;
      std::fill(total.begin(), total.end(), 0.f);
      if (there != -INFINITY) {
        sum = std::exp2(there - against);
        for (int d = 0; d < D; ++d) total[d] = to[d] * sum;
      }
      for (int64_t p = 0; p < call.parts; ++p) {
        const float factor = std::exp2(part[p * step + width] - against);
        sum += part[p * step + width + 1] * factor;
        for (int d = 0; d < D; ++d) total[d] += part[p * step + d] * factor;
      }
      for (int d = 0; d < D; ++d) to[d] = sum == 0 ? 0 : total[d] / sum;
      *of_lse = (max + std::log2(sum)) * LN_2 + call.log_count;
    }
}

// ---- Backward ----------------------------------------------------------------------------------------------------

struct BackwardTile {
  float *q, *dout, *dq;       // [D][QUERIES]
  float *q_rows, *dout_rows;  // [QUERIES][width]
  float *lse, *delta;         // [QUERIES]; delta is rowsum(dout * out)
  Tile tile{};
  BackwardTile(Room& room, int D, int width)
      : q(room.take(D * QUERIES)), dout(room.take(D * QUERIES)), dq(room.take(D * QUERIES)),
        q_rows(room.take(width * QUERIES)), dout_rows(room.take(width * QUERIES)), lse(room.take(QUERIES)),
        delta(room.take(QUERIES)) {}
};

struct BackwardRoom {
  std::vector<BackwardTile> tiles;
  float *keys, *values, *weights, *slopes, *of_cap, *factors;
  float *dk, *dv;  // [number of keys][width]
  BackwardRoom(Room& room, int D, int width, int64_t number_of_keys) {
    for (int t = 0; t < BACKWARD_TILES; ++t) tiles.emplace_back(room, D, width);
    keys = room.take(KEYS * D), values = room.take(KEYS * D);
    weights = room.take(KEYS * QUERIES), slopes = room.take(KEYS * QUERIES), of_cap = room.take(KEYS * QUERIES);
    factors = room.take(QUERIES);
    dk = room.take(number_of_keys * width), dv = room.take(number_of_keys * width);
  }
};

template <class T>
float row_sum(const T* out, const float* dout, int D) {
  Floats sums = {};
  float sum = 0;
  int d = 0;
  for (; d + LANES <= D; d += LANES) sums += load(out + d) * load(dout + d);
  for (; d < D; ++d) sum += one(out + d) * dout[d];
  for (int i = 0; i < LANES; ++i) sum += sums[i];
  return sum;
}

// Scores become weights, and gradients of weights become gradients of scores; of_cap: the derivatives of their cap.
void differentiate(const BackwardTile& s, int n, float* weights, float* slopes, const float* of_cap) {
  for (int x = 0; x < s.tile.vectors(); ++x) {
    const Floats lse = load(s.lse + x * LANES), delta = load(s.delta + x * LANES);
    for (int m = 0; m < n; ++m) {
      const int at = m * QUERIES + x * LANES;
      const Floats logarithm = load(weights + at) - lse;
      const Floats weight = exp2(logarithm > 128.f ? all(128.f) : logarithm);
      store(weights + at, weight);
      const Floats slope = weight * (load(slopes + at) - delta);
      store(slopes + at, of_cap ? slope * load(of_cap + at) : slope);
    }
  }
}

// An item is the heads that share keys, so that no two threads write the same rows of dk and dv. Where there are fewer
// than threads, each of `parts` of the queries is an item: then dk and dv are zeros for [parts * batch] batch items, in
// rows of whole vectors, and added to as they are.
template <class T>
void backward(const Call& call, int64_t parts, Operand<const T> dout, Operand<const T> q, Operand<const T> k,
              Operand<const T> v, Operand<const T> out, Lse lse, Operand<float> dq, Operand<float> dk,
              Operand<float> dv) {
  const int D = (int)call.head_dim, width = whole_vectors(D);
  const Groups groups(call, QUERIES * BACKWARD_TILES);
  const int64_t count = groups.count();
  in_threads(call, call.batch * call.key_heads * parts, [&](Room space, auto next) {
    BackwardRoom room(space, D, width, parts == 1 ? call.keys : 0);
    std::fill_n(room.factors, QUERIES, call.scale);
    for (int64_t item; (item = next()) >= 0;) {
      const int64_t part = item % parts, b = item / parts / call.key_heads, kh = item / parts % call.key_heads;
      float* dk_sums = parts == 1 ? room.dk : dk.at(part * call.batch + b, kh, 0);
      float* dv_sums = parts == 1 ? room.dv : dv.at(part * call.batch + b, kh, 0);
      if (parts == 1) {
        std::fill_n(dk_sums, call.keys * width, 0.f);
        std::fill_n(dv_sums, call.keys * width, 0.f);
      }
      // A part takes every so-manieth group, so that all see as much under a causal mask.
      for (int64_t j = part; j < call.group() * count; j += parts) {
        const int64_t h = kh * call.group() + j / count;
        const Group group = groups.group(h, j % count);
        const int tiles = group.tiles();
        if (tiles <= 0) continue;
        for (int t = 0; t < tiles; ++t) {
          BackwardTile& s = room.tiles[t];
          s.tile = group.tile(call, t);
          const int64_t row = s.tile.first;
          const int count = s.tile.count;
          to_columns(q.at(b, h, row), q.row, count, D, call.scale * LOG2_E, s.q);
          to_columns(dout.at(b, h, row), dout.row, count, D, 1.f, s.dout);
          copy_rows(q.at(b, h, row), q.row, count, D, call.scale, s.q_rows, width);
          copy_rows(dout.at(b, h, row), dout.row, count, D, 1.f, s.dout_rows, width);
          std::fill_n(s.dq, D * QUERIES, 0.f);
          // Queries that see nothing have no weights.
          std::fill_n(s.lse, QUERIES, INFINITY);
          std::fill_n(s.delta, QUERIES, 0.f);
          const float* of_rows = lse.at(b, h, row);
          for (int r = 0; r < count; ++r) {
            const float of_row = of_rows[r * lse.row];
            if (of_row != -INFINITY) s.lse[r] = (of_row - call.log_count) * LOG2_E;
            s.delta[r] = row_sum(out.at(b, h, row + r), s.dout_rows + r * width, D);
          }
        }
        over_keys(call, group, room.tiles, [&](int64_t key, int n) {
          copy_rows(k.at(b, kh, key), k.row, n, D, 1.f, room.keys, D);
          copy_rows(v.at(b, kh, key), v.row, n, D, 1.f, room.values, D);
          const Rows dk_rows{dk_sums + key * width, width}, dv_rows{dv_sums + key * width, width};
          for (int t = 0; t < tiles; ++t) {
            BackwardTile& s = room.tiles[t];
            if (!s.tile.sees(call.band, key, n, call.keys)) continue;
            const int vectors = s.tile.vectors(), columns = width / LANES, count = s.tile.count;
            const Rows weights{room.weights, QUERIES}, slopes{room.slopes, QUERIES};
            multiply(Into::set, n, vectors, D, {room.keys, D, 1}, {s.q, QUERIES}, weights);
            multiply(Into::set, n, vectors, D, {room.values, D, 1}, {s.dout, QUERIES}, slopes);
            const bool capped = call.softcap > 0;
            if (capped) cap(call.softcap, n, vectors, room.weights, room.of_cap);
            if (s.tile.misses(call.band, key, n, call.keys)) s.tile.hide(call.band, key, n, room.weights);
            s.tile.hide(call.hidden, key, n, room.weights);
            differentiate(s, n, room.weights, room.slopes, capped ? room.of_cap : nullptr);
            multiply(Into::add, D, vectors, n, {room.keys, 1, D}, slopes, {s.dq, QUERIES});
            multiply(Into::add, n, columns, count, {room.weights, QUERIES, 1}, {s.dout_rows, width}, dv_rows);
            multiply(Into::add, n, columns, count, {room.slopes, QUERIES, 1}, {s.q_rows, width}, dk_rows);
          }
        });
        for (int t = 0; t < tiles; ++t) {
          BackwardTile& s = room.tiles[t];
          to_rows(s.dq, room.factors, s.tile.count, D, dq.at(b, h, s.tile.first), dq.row, call.onto);
        }
      }
      if (parts > 1) continue;
      put_rows(dk_sums, width, call.keys, D, dk.at(b, kh, 0), dk.row, call.onto);
      put_rows(dv_sums, width, call.keys, D, dv.at(b, kh, 0), dv.row, call.onto);
    }
  });
}

// ---- Called from Python ------------------------------------------------------------------------------------------

struct Place {
  void* data;
  int64_t batch, head, row;
  template <class T>
  operator Operand<T>() const {
    return {(T*)data, batch, head, row};
  }
};

// What Python packs (`_PACKED`).
struct Forward {
  Call call;
  Place q, k, v, out;
  Lse lse;
};
struct Backward {
  Call call;
  int64_t parts;
  Place dout, q, k, v, out;
  Lse lse;
  Place dq, dk, dv;
};

template <class Work>
void of_type(int type, Work work) {
  switch (type) {
    case 0:
      return work(float{});
    case 1:
      return work(BFloat16{});
    case 2:
      return work(Float16{});
  }
}

}  // namespace

extern "C" {

void flash_forward(const Forward* given, int type) {
  of_type(type, [&](auto number) {
    const Forward& a = *given;
    (a.call.parts ? forward_of_few<decltype(number)> : forward<decltype(number)>)(a.call, a.q, a.k, a.v, a.out, a.lse);
  });
}

void flash_backward(const Backward* given, int type) {
  of_type(type, [&](auto number) {
    const Backward& a = *given;
    backward<decltype(number)>(a.call, a.parts, a.dout, a.q, a.k, a.v, a.out, a.lse, a.dq, a.dk, a.dv);
  });
}

// Numbers that a thread of a pass takes room for.
int64_t flash_forward_room(int64_t head_dim) {
  Room room(nullptr);
  ForwardRoom(room, head_dim);
  return room.taken();
}
int64_t flash_few_room(int64_t key_heads, int64_t rows, int64_t head_dim) {
  Room room(nullptr);
  FewRoom(room, key_heads, rows, whole_vectors(head_dim));
  return room.taken();
}
int64_t flash_backward_room(int64_t head_dim, int64_t keys) {
  Room room(nullptr);
  BackwardRoom(room, head_dim, whole_vectors(head_dim), keys);
  return room.taken();
}
}
