// Attention of many queries to one run of keys, with its log-sum-exp, in fp32: what native.py calls.
//
// The queries are the lanes of the vectors: scores are kept as [key][query] and outputs as [dim][query], so keys and
// values are read as they lie, one number at a time for all queries, and no softmax reduces across a vector. The
// queries of one key-value head make up blocks of up to QUERIES lanes; a block takes CHUNK keys at a time (online
// softmax, Milakov and Gimelshein 2018, arXiv 1805.02867). Few queries would leave most lanes idle, so their lanes are
// dims. Where there are fewer blocks than threads want, each is cut along its keys; whoever ends a block's last part
// merges them.
//
// Vectors are as wide as the compiler's flags allow. Nothing here knows torch or Python: the caller hands over
// addresses, strides in numbers, and the function of its OpenMP runtime that starts the threads.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16, TILE = 8;
#elif defined(__AVX2__)
constexpr int WIDTH = 8, TILE = 4;
#else
#error "give flags for AVX2 or AVX-512: with less, torch's own kernel is faster"
#endif

constexpr int VECTORS = 3, QUERIES = VECTORS * WIDTH;
constexpr int FEW = 4;      // so many queries are few
constexpr int CHUNK = 64;   // keys of one softmax
constexpr int CHAIN = 32;   // products added up before their sum joins another: bounds the rounding error
constexpr int PANEL = 4;    // vectors of dims that few queries keep in registers
constexpr int MAX_DIM = 256;
constexpr int PARTS_PER_THREAD = 4;

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef float Unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

typedef void (*Start)(void (*work)(void *), void *data, unsigned num_threads, unsigned flags);

// `num_lanes` runs of keys, each for `num_queries` queries of every head; native.py says what stands in it.
struct Problem {
  const float *q, *k, *v;
  float *out, *lse;
  const int64_t *rows;
  const uint8_t *mask;
  Start start;
  int64_t num_threads, is_causal, is_merged;
  int64_t num_lanes, num_kv_heads, num_groups, num_queries, num_keys, dim;
  int64_t q_lane, q_row, q_head;
  int64_t k_lane, k_row, k_head;
  int64_t v_lane, v_row, v_head;
  int64_t out_lane, out_row, out_head;
  int64_t lse_lane, lse_row, lse_head;
  int64_t mask_lane, mask_row;
  double scale;
};

inline Vector all(float x) { return Vector{} + x; }

inline Vector load(const float *x) { return (Vector) * (const Unaligned *)x; }

inline float sum_of(Vector x) {
#pragma GCC unroll 4
  for (int step = WIDTH / 2; step; step /= 2) {
    Ints other;
    for (int i = 0; i < WIDTH; i++) other[i] = i ^ step;
    x += __builtin_shuffle(x, other);
  }
  return x[0];
}

// e^x for x <= 0, by the polynomial of Cephes' expf: exactly 0 where a normal number cannot hold it, NaN for NaN.
inline Vector exp_of(Vector x) {
  const Vector shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector n = (x * 1.44269504088896341f + shift) - shift;
  const Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vector p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return x < -87.0f ? Vector{} : p * (Vector)exponent;
}

// What one block, or a part of its keys, has seen: outputs before their division by `sum`, as [dim][query], or as
// [query][dim] for few queries.
struct State {
  float out[MAX_DIM * QUERIES], highest[QUERIES], sum[QUERIES];
} __attribute__((aligned(64)));

// A block: the pairs (query, head of the group) from `first` on, `count` of them, of one run of keys and one head.
struct Block {
  const Problem &p;
  int64_t lane, head, first;
  int count;

  int64_t query(int i) const { return (first + i) / p.num_groups; }
  int64_t q_head(int i) const { return head * p.num_groups + (first + i) % p.num_groups; }
  bool is_few() const { return count <= FEW && p.dim % WIDTH == 0; }
  int num_vectors() const { return (count + WIDTH - 1) / WIDTH; }
  // The row of the i-th pair; -1 for nobody.
  int64_t row(int i) const { return p.rows ? p.rows[lane * p.num_queries + query(i)] : query(i); }
  const float *q(int i) const {
    const int64_t at = row(i);
    return p.q + lane * p.q_lane + (at < 0 ? 0 : at) * p.q_row + q_head(i) * p.q_head;
  }
  const float *k(int64_t key) const { return p.k + lane * p.k_lane + head * p.k_head + key * p.k_row; }
  const float *v(int64_t key) const { return p.v + lane * p.v_lane + head * p.v_head + key * p.v_row; }
};

// Overwrite the scores of keys that a query may not see; key t of the `num` from `start` on is at `t * by_key`.
void hide(const Block &block, int64_t start, int num, int by_key, int by_query, float *scores) {
  const Problem &p = block.p;
  for (int i = 0; i < block.count; i++) {
    const int64_t query = block.query(i);
    float *own = scores + i * by_query;
    if (p.is_causal)
      for (int64_t t = query + 1 > start ? query + 1 - start : 0; t < num; t++) own[t * by_key] = -INFINITY;
    if (p.mask) {
      const uint8_t *is_seen = p.mask + block.lane * p.mask_lane + query * p.mask_row + start;
      for (int t = 0; t < num; t++)
        if (!is_seen[t]) own[t * by_key] = -INFINITY;
    }
  }
}

// scores[t][query] of `num` keys, with room for whole tiles; fetches their values, and the keys behind them.
template <int NV>
void score(const float *q_DQ, const Block &block, int64_t start, int num, float *scores) {
  const int dim = block.p.dim;
  float padded[TILE * MAX_DIM];
  for (int t = 0; t < num; t += TILE) {
    const float *keys = block.k(start + t);
    int64_t k_row = block.p.k_row;
    for (int j = 0; j < TILE; j++)
      for (int d = 0; d < dim; d += 16) {
        __builtin_prefetch(block.v(start + t + j) + d, 0, 2);
        __builtin_prefetch(keys + (CHUNK + j) * k_row + d, 0, 2);
      }
    if (num - t < TILE) {
      for (int j = 0; j < TILE; j++)
        memcpy(padded + j * dim, keys + (t + j < num ? j : 0) * k_row, 4 * dim);
      keys = padded, k_row = dim;
    }
    Vector *kept = (Vector *)(scores + t * NV * WIDTH);
    for (int first = 0; first < dim; first += CHAIN) {
      const int last = first + CHAIN < dim ? first + CHAIN : dim;
      Vector sums[TILE][NV] = {};
      for (int d = first; d < last; d++) {
        const Vector *query = (const Vector *)(q_DQ + d * NV * WIDTH);
#pragma GCC unroll 8
        for (int j = 0; j < TILE; j++) {
          const Vector key = all(keys[j * k_row + d]);
#pragma GCC unroll 4
          for (int i = 0; i < NV; i++) sums[j][i] += key * query[i];
        }
      }
#pragma GCC unroll 8
      for (int j = 0; j < TILE; j++)
#pragma GCC unroll 4
        for (int i = 0; i < NV; i++) kept[j * NV + i] = first ? kept[j * NV + i] + sums[j][i] : sums[j][i];
    }
  }
}

// out[d][query] = out[d][query] * fade[query] + sum over t of probs[t][query] * v[t][d].
template <int NV>
void add_values(const float *probs, const Block &block, int64_t start, int num, const Vector *fade, float *out) {
  for (int d = 0; d < block.p.dim; d += TILE) {
    Vector sums[TILE][NV] = {};
    for (int t = 0; t < num; t++) {
      const Vector *prob = (const Vector *)(probs + t * NV * WIDTH);
      const float *value = block.v(start + t) + d;
#pragma GCC unroll 8
      for (int j = 0; j < TILE; j++) {
        const Vector one = all(value[j]);
#pragma GCC unroll 4
        for (int i = 0; i < NV; i++) sums[j][i] += one * prob[i];
      }
    }
    Vector *kept = (Vector *)(out + d * NV * WIDTH);
#pragma GCC unroll 8
    for (int j = 0; j < TILE; j++)
#pragma GCC unroll 4
      for (int i = 0; i < NV; i++) kept[j * NV + i] = kept[j * NV + i] * fade[i] + sums[j][i];
  }
}

template <int NV>
void see(const Block &block, int64_t start, int64_t end, State &state) {
  const int dim = block.p.dim, stride = NV * WIDTH;
  alignas(64) float q_DQ[MAX_DIM * NV * WIDTH], scores[CHUNK * NV * WIDTH];
  memset(q_DQ, 0, 4 * dim * stride);
  memset(state.out, 0, 4 * dim * stride);
  for (int i = 0; i < block.count; i++) {
    const float *q = block.q(i);
    for (int d = 0; d < dim; d++) q_DQ[d * stride + i] = q[d] * (float)block.p.scale;
  }
  Vector *highest = (Vector *)state.highest, *sum = (Vector *)state.sum, *score_of = (Vector *)scores, fade[NV];
  for (int i = 0; i < NV; i++) highest[i] = all(-INFINITY), sum[i] = all(0);
  for (int64_t at = start; at < end; at += CHUNK) {
    const int num = end - at < CHUNK ? end - at : CHUNK;
    score<NV>(q_DQ, block, at, num, scores);
    if (block.p.mask || (block.p.is_causal && at + num > block.query(0) + 1)) hide(block, at, num, stride, 1, scores);
    for (int i = 0; i < NV; i++) {
      Vector top = highest[i], total = all(0);
      for (int t = 0; t < num; t++) top = score_of[t * NV + i] > top ? score_of[t * NV + i] : top;
      const Vector level = top == -INFINITY ? all(0) : top;
      for (int t = 0; t < num; t++) total += score_of[t * NV + i] = exp_of(score_of[t * NV + i] - level);
      fade[i] = exp_of(highest[i] - level);
      sum[i] = sum[i] * fade[i] + total;
      highest[i] = top;
    }
    add_values<NV>(scores, block, at, num, fade, state.out);
  }
}

// scores[i][t] of `num` keys; fetches their values.
template <int N>
void score_few(const float *q_ND, const Block &block, int64_t start, int num, float (*scores)[CHUNK]) {
  const int dim = block.p.dim;
  for (int t = 0; t < num; t++) {
    const float *key = block.k(start + t), *value = block.v(start + t);
    Vector sums[N] = {};
    for (int d = 0; d < dim; d += WIDTH) {
      __builtin_prefetch(value + d, 0, 2);
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) sums[i] += load(key + d) * load(q_ND + i * dim + d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) scores[i][t] = sum_of(sums[i]);
  }
}

// out[i][d] = out[i][d] * fade[i] + sum over t of probs[i][t] * v[t][d].
template <int N>
void add_values_few(const float (*probs)[CHUNK], const Block &block, int64_t start, int num, const float *fade,
                    float *out) {
  const int dim = block.p.dim;
  for (int d = 0; d < dim; d += PANEL * WIDTH) {
    const int width = (dim - d) / WIDTH < PANEL ? (dim - d) / WIDTH : PANEL;
    Vector sums[N][PANEL] = {};
    for (int t = 0; t < num; t++) {
      const float *value = block.v(start + t) + d;
      for (int c = 0; c < width; c++) {
        const Vector one = load(value + c * WIDTH);
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) sums[i][c] += one * probs[i][t];
      }
    }
    for (int i = 0; i < N; i++)
      for (int c = 0; c < width; c++) {
        Vector &kept = *((Vector *)(out + i * dim + d) + c);
        kept = kept * fade[i] + sums[i][c];
      }
  }
}

template <int N>
void see_few(const Block &block, int64_t start, int64_t end, State &state) {
  const int dim = block.p.dim;
  alignas(64) float q_ND[N * MAX_DIM], scores[N][CHUNK];
  memset(state.out, 0, 4 * dim * N);
  for (int i = 0; i < N; i++) {
    const float *q = block.q(i);
    for (int d = 0; d < dim; d++) q_ND[i * dim + d] = q[d] * (float)block.p.scale;
    state.highest[i] = -INFINITY, state.sum[i] = 0;
  }
  for (int64_t at = start; at < end; at += CHUNK) {
    const int num = end - at < CHUNK ? end - at : CHUNK;
    float fade[N];
    score_few<N>(q_ND, block, at, num, scores);
    if (block.p.mask || block.p.is_causal) hide(block, at, num, 1, CHUNK, scores[0]);
    for (int i = 0; i < N; i++) {
      float top = state.highest[i];
      for (int t = num; t % WIDTH; t++) scores[i][t] = -INFINITY;
      for (int t = 0; t < num; t++) top = scores[i][t] <= top ? top : scores[i][t];
      const float level = top == -INFINITY ? 0 : top;
      Vector total = all(0), *row = (Vector *)scores[i];
      for (int t = 0; t * WIDTH < num; t++) total += row[t] = exp_of(row[t] - level);
      fade[i] = expf(state.highest[i] - level);
      state.sum[i] = state.sum[i] * fade[i] + sum_of(total);
      state.highest[i] = top;
    }
    add_values_few<N>(scores, block, at, num, fade, state.out);
  }
}

void see_any(const Block &block, int64_t start, int64_t end, State &state) {
  if (block.is_few()) switch (block.count) {
      case 1: return see_few<1>(block, start, end, state);
      case 2: return see_few<2>(block, start, end, state);
      case 3: return see_few<3>(block, start, end, state);
      default: return see_few<4>(block, start, end, state);
    }
  switch (block.num_vectors()) {
    case 1: return see<1>(block, start, end, state);
    case 2: return see<2>(block, start, end, state);
    default: return see<3>(block, start, end, state);
  }
}

// Write the block's results: its parts merged, divided, and merged with what stands there if the problem says so.
void give(const Block &block, const State *parts, int num_parts) {
  const Problem &p = block.p;
  const int by_dim = block.is_few() ? 1 : block.num_vectors() * WIDTH, by_query = block.is_few() ? p.dim : 1;
  for (int i = 0; i < block.count; i++) {
    const int64_t row = block.row(i);
    if (row < 0) continue;
    float *out = p.out + block.lane * p.out_lane + row * p.out_row + block.q_head(i) * p.out_head;
    float *lse = p.lse + block.lane * p.lse_lane + row * p.lse_row + block.q_head(i) * p.lse_head;
    float highest = p.is_merged ? *lse : -INFINITY;
    for (int n = 0; n < num_parts; n++) highest = parts[n].highest[i] <= highest ? highest : parts[n].highest[i];
    const float level = highest == -INFINITY ? 0 : highest;
    float kept = p.is_merged ? expf(*lse - level) : 0, total = kept;
    for (int n = 0; n < num_parts; n++) total += expf(parts[n].highest[i] - level) * parts[n].sum[i];
    const float share = total == 0 ? 0 : 1 / total;
    kept *= share;
    for (int d = 0; d < p.dim; d++) out[d] = kept == 0 ? 0 : out[d] * kept;
    for (int n = 0; n < num_parts; n++) {
      const float weight = expf(parts[n].highest[i] - level) * share;
      for (int d = 0; d < p.dim; d++) out[d] += weight * parts[n].out[d * by_dim + i * by_query];
    }
    *lse = level + logf(total);
  }
}

// The parts of a problem, [lane][block][kv head][part]; the threads take them from `num_left`, the last one first:
// where queries see only keys before them, those are the longest.
struct Work {
  const Problem &p;
  int64_t num_blocks, pairs_per_block, num_parts, keys_per_part, num_left;
  State *states;
  int32_t *missing;

  Block block(int64_t n) const {
    const int64_t head = n % p.num_kv_heads, first = n / p.num_kv_heads % num_blocks * pairs_per_block;
    const int64_t left = p.num_queries * p.num_groups - first;
    const int count = left < pairs_per_block ? left : pairs_per_block;
    return {p, n / p.num_kv_heads / num_blocks, head, first, count};
  }
};

void run(void *data) {
  Work &work = *(Work *)data;
  const Problem &p = work.p;
  State own;
  for (;;) {
    const int64_t item = __atomic_sub_fetch(&work.num_left, 1, __ATOMIC_RELAXED);
    if (item < 0) return;
    const int64_t n = item / work.num_parts, part = item % work.num_parts;
    const Block block = work.block(n);
    const int64_t start = part * work.keys_per_part;
    int64_t end = start + work.keys_per_part < p.num_keys ? start + work.keys_per_part : p.num_keys;
    if (p.is_causal && end > block.query(block.count - 1) + 1) end = block.query(block.count - 1) + 1;
    State *parts = work.num_parts == 1 ? &own : work.states + n * work.num_parts;
    see_any(block, start, end, parts[part]);
    if (work.num_parts == 1 || __atomic_sub_fetch(&work.missing[n], 1, __ATOMIC_ACQ_REL) == 0)
      give(block, parts, work.num_parts);
  }
}

// Memory of this thread that stays from call to call: handing it back costs more page faults than attention takes.
void *scratch(size_t size) {
  static thread_local void *kept = nullptr;
  static thread_local size_t kept_size = 0;
  if (size > kept_size) {
    free(kept);
    kept_size = 0;
    if (posix_memalign(&kept, 64, size)) return kept = nullptr;
    kept_size = size;
  }
  return kept;
}

}  // namespace

// 0, or 1 where memory is short.
extern "C" int arctic_attend(const Problem *problem) {
  const Problem &p = *problem;
  const int64_t num_pairs = p.num_queries * p.num_groups, num_blocks = (num_pairs + QUERIES - 1) / QUERIES;
  Work work = {p, num_blocks, (num_pairs + num_blocks - 1) / num_blocks, 1, p.num_keys, 0, nullptr, nullptr};
  const int64_t num_wholes = p.num_lanes * p.num_kv_heads * num_blocks;
  if (p.num_threads > 1 && num_wholes < PARTS_PER_THREAD * p.num_threads && p.num_keys > 4 * CHUNK) {
    int64_t num_parts = (PARTS_PER_THREAD * p.num_threads + num_wholes - 1) / num_wholes;
    while (num_wholes * num_parts % p.num_threads) num_parts++;
    const int64_t wanted = (p.num_keys + num_parts - 1) / num_parts;
    work.keys_per_part = wanted < 2 * CHUNK ? 2 * CHUNK : wanted;
    work.num_parts = (p.num_keys + work.keys_per_part - 1) / work.keys_per_part;
  }
  work.num_left = num_wholes * work.num_parts;
  if (work.num_parts > 1) {
    work.states = (State *)scratch(work.num_left * sizeof(State) + num_wholes * sizeof(int32_t));
    if (!work.states) return 1;
    work.missing = (int32_t *)(work.states + work.num_left);
    for (int64_t n = 0; n < num_wholes; n++) work.missing[n] = work.num_parts;
  }
  if (p.num_threads > 1 && work.num_left > 1)
    p.start(run, &work, p.num_threads, 0);
  else
    run(&work);
  return 0;
}
