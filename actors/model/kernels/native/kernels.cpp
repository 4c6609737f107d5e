// Kernels of a decoder layer on a CPU: RMS norm, rotary embedding, gated activation, KV cache write, paged decode attention.
//
// Every function is a plain C function on raw pointers, so that it compiles in seconds and needs no headers of torch. Arithmetic
// is in fp32 whatever the type of the tensors. The result of a row depends on no other row of the step, bit for bit: rows are
// divided among threads, and the keys of a row are always cut into the same chunks.
//
// `library.py` passes addresses, sizes and strides (in elements), and checks none of them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kChunk = 256;         // tokens of one row that one task reads
constexpr int64_t kParallelFrom = 1 << 14;  // elements from which a kernel uses several threads

struct BFloat16 {
    uint16_t bits;
};

inline float load(float x) { return x; }

inline float load(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void store(float* to, float value) { *to = value; }

inline void store(BFloat16* to, float value) {  // rounds to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    to->bits = uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? ((bits >> 16) | 0x40u) : rounded);
}

// exp(x) with a relative error below 2e-7; 0 below -87.3, NaN for NaN. Compilers vectorise it, which they cannot do to expf.
inline float fast_exp(float x) {
    float clipped = x < -87.3f ? -87.3f : x;
    clipped = clipped > 88.3f ? 88.3f : clipped;
    float n = std::nearbyint(clipped * 1.44269504f);
    float r = clipped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    float result = p * scale;
    return x < -87.3f ? 0.0f : (x == x ? result : x);
}

inline float capped(float score, float cap) {  // cap * tanh(score / cap)
    float e = fast_exp(2.0f * std::fmin(std::fmax(score / cap, -20.0f), 20.0f));
    float value = cap * (e - 1.0f) / (e + 1.0f);
    return score == score ? value : score;
}

#if defined(__AVX512BF16__)

inline __m512 load16(const BFloat16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

inline void store16(BFloat16* to, __m512 value) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value)); }

inline __m512 exp16(__m512 x) {  // fast_exp of 16 numbers
    x = _mm512_min_ps(_mm512_set1_ps(88.3f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));  // in this order NaN stays
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

#endif

template <typename T>
void rms_norm(const T* x, int64_t row_stride, int64_t head_stride, const T* weight, float eps, T* out, int64_t rows,
              int64_t heads, int64_t width) {
#pragma omp parallel for if (rows * heads * width >= kParallelFrom)
    for (int64_t row = 0; row < rows * heads; ++row) {
        const T* in = x + row / heads * row_stride + row % heads * head_stride;
        T* to = out + row * width;
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; ++i) {
            float value = load(in[i]);
            squares += value * value;
        }
        float scale = 1.0f / std::sqrt(squares / float(width) + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) store(to + i, load(in[i]) * scale * load(weight[i]));
    }
}

template <typename T>
void add(const T* a, const T* b, int64_t b_stride, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width >= kParallelFrom)
    for (int64_t row = 0; row < rows; ++row)
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) store(out + row * width + i, load(a[row * width + i]) + load(b[row * b_stride + i]));
}

template <typename T>
void silu_mul_from(int64_t i, const T* gate, const T* up, T* out, int64_t width) {
    for (; i < width; ++i) {
        float g = load(gate[i]);
        T activated;  // rounded, as if it were a tensor of its own
        store(&activated, g / (1.0f + fast_exp(-g)));
        store(out + i, load(activated) * load(up[i]));
    }
}

template <typename T>
void silu_mul_row(const T* gate, const T* up, T* out, int64_t width) {
    silu_mul_from(0, gate, up, out, width);
}

#if defined(__AVX512BF16__)

void silu_mul_row(const BFloat16* gate, const BFloat16* up, BFloat16* out, int64_t width) {
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
        __m512 g = load16(gate + i);
        BFloat16 activated[16];
        store16(activated, _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), g)))));
        store16(out + i, _mm512_mul_ps(load16(activated), load16(up + i)));
    }
    silu_mul_from(i, gate, up, out, width);
}

#endif

template <typename T>
void silu_mul(const T* gate_up, int64_t stride, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width >= kParallelFrom)
    for (int64_t row = 0; row < rows; ++row)
        silu_mul_row(gate_up + row * stride, gate_up + row * stride + width, out + row * width, width);
}

// cos and sin are [rows, dim] fp32; the first half of sin is negated.
template <typename T>
void rotate(const T* x, int64_t row_stride, int64_t head_stride, const float* cosines, const float* sines, T* out,
            int64_t rows, int64_t heads, int64_t dim) {
    int64_t half = dim / 2;
#pragma omp parallel for if (rows * heads * dim >= kParallelFrom)
    for (int64_t row = 0; row < rows; ++row) {
        const float* cosine = cosines + row * dim;
        const float* sine = sines + row * dim;
        for (int64_t head = 0; head < heads; ++head) {
            const T* in = x + row * row_stride + head * head_stride;
            T* to = out + (row * heads + head) * dim;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                float a = load(in[i]), b = load(in[i + half]);
                store(to + i, a * cosine[i] + b * sine[i]);
                store(to + i + half, b * cosine[i + half] + a * sine[i + half]);
            }
        }
    }
}

// Stores x [rows, heads, dim] in one plane [heads, slots, dim] of the cache. A negative slot is not stored.
template <typename T>
void write_plane(const T* x, int64_t row_stride, int64_t head_stride, const int64_t* slots, T* plane, int64_t rows,
                 int64_t heads, int64_t num_slots, int64_t dim) {
#pragma omp parallel for if (rows * heads * dim >= kParallelFrom)
    for (int64_t row = 0; row < rows; ++row) {
        if (slots[row] < 0) continue;
        for (int64_t head = 0; head < heads; ++head)
            std::memcpy(plane + (head * num_slots + slots[row]) * dim, x + row * row_stride + head * head_stride,
                        size_t(dim) * sizeof(T));
    }
}

// The keys and values of one layer: [kv_heads, num_slots, dim] each. A block is `block_size` slots.
template <typename T>
struct Pages {
    const T* keys;
    const T* values;
    int64_t num_slots, block_size, key_dim, value_dim;
};

// Replaces `count` scores by exp(score - the largest one), after the cap; writes the largest one and the sum of these.
inline void softmax(float* scores, int64_t count, float cap, float* top, float* mass) {
    if (cap > 0.0f)
        for (int64_t t = 0; t < count; ++t) scores[t] = capped(scores[t], cap);
    float highest = -kInfinity, total = 0.0f;
#pragma omp simd reduction(max : highest)
    for (int64_t t = 0; t < count; ++t) highest = scores[t] > highest ? scores[t] : highest;
    float shift = highest == -kInfinity ? 0.0f : highest;
    int64_t t = 0;
#if defined(__AVX512BF16__)
    __m512 totals = _mm512_setzero_ps();
    for (; t + 16 <= count; t += 16) {
        __m512 weight = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + t), _mm512_set1_ps(shift)));
        _mm512_storeu_ps(scores + t, weight);
        totals = _mm512_add_ps(totals, weight);
    }
    total = _mm512_reduce_add_ps(totals);
#endif
    for (; t < count; ++t) {
        scores[t] = fast_exp(scores[t] - shift);
        total += scores[t];
    }
    *top = highest;
    *mass = total;
}

// scores[g][t] = queries[g] . keys[t] for `count` tokens; queries are fp32 [group, dim], already scaled.
template <typename T>
void score(const float* queries, int64_t group, const T* const* keys, int64_t count, int64_t dim, float* scores) {
    for (int64_t t = 0; t < count; ++t)
        for (int64_t g = 0; g < group; ++g) {
            const float* query = queries + g * dim;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < dim; ++d) sum += query[d] * load(keys[t][d]);
            scores[g * kChunk + t] = sum;
        }
}

// sums[g] = the sum of weights[g][t] * values[t] over `count` tokens.
template <typename T>
void weigh(const float* weights, int64_t group, const T* const* values, int64_t count, int64_t dim, float* sums) {
    std::fill(sums, sums + group * dim, 0.0f);
    for (int64_t t = 0; t < count; ++t)
        for (int64_t g = 0; g < group; ++g) {
            float weight = weights[g * kChunk + t];
#pragma omp simd
            for (int64_t d = 0; d < dim; ++d) sums[g * dim + d] += weight * load(values[t][d]);
        }
}

#if defined(__AVX512BF16__)

// `score` and `weigh` with vector instructions, for heads of whole vectors: the vectors of a token are converted once for the
// whole group, and the sums of four queries stay in registers.
template <int VECTORS>
void score_vectors(const float* queries, int64_t group, const BFloat16* const* keys, int64_t count, float* scores) {
    for (int64_t t = 0; t < count; ++t) {
        __m512 key[VECTORS];
        for (int v = 0; v < VECTORS; ++v) key[v] = load16(keys[t] + 16 * v);
        for (int64_t g = 0; g < group; ++g) {
            __m512 sum = _mm512_setzero_ps();
            for (int v = 0; v < VECTORS; ++v)
                sum = _mm512_fmadd_ps(_mm512_loadu_ps(queries + (g * VECTORS + v) * 16), key[v], sum);
            scores[g * kChunk + t] = _mm512_reduce_add_ps(sum);
        }
    }
}

template <int QUERIES, int VECTORS>
void weigh_vectors(const float* weights, const BFloat16* const* values, int64_t count, int64_t at, int64_t dim, float* sums) {
    __m512 totals[QUERIES][VECTORS];
    for (int g = 0; g < QUERIES; ++g)
        for (int v = 0; v < VECTORS; ++v) totals[g][v] = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; ++t)
        for (int v = 0; v < VECTORS; ++v) {
            __m512 value = load16(values[t] + at + 16 * v);
            for (int g = 0; g < QUERIES; ++g)
                totals[g][v] = _mm512_fmadd_ps(_mm512_set1_ps(weights[g * kChunk + t]), value, totals[g][v]);
        }
    for (int g = 0; g < QUERIES; ++g)
        for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(sums + g * dim + at + 16 * v, totals[g][v]);
}

void score(const float* queries, int64_t group, const BFloat16* const* keys, int64_t count, int64_t dim, float* scores) {
    if (dim == 64) return score_vectors<4>(queries, group, keys, count, scores);
    if (dim == 96) return score_vectors<6>(queries, group, keys, count, scores);
    if (dim == 128) return score_vectors<8>(queries, group, keys, count, scores);
    score<BFloat16>(queries, group, keys, count, dim, scores);
}

void weigh(const float* weights, int64_t group, const BFloat16* const* values, int64_t count, int64_t dim, float* sums) {
    if (dim % 32 != 0) return weigh<BFloat16>(weights, group, values, count, dim, sums);
    for (int64_t at = 0; at < dim; at += 32)
        for (int64_t g = 0; g < group;) {
            int64_t left = group - g;
            const float* own = weights + g * kChunk;
            float* to = sums + g * dim;
            if (left >= 4) weigh_vectors<4, 2>(own, values, count, at, dim, to);
            else if (left == 3) weigh_vectors<3, 2>(own, values, count, at, dim, to);
            else if (left == 2) weigh_vectors<2, 2>(own, values, count, at, dim, to);
            else weigh_vectors<1, 2>(own, values, count, at, dim, to);
            g += std::min<int64_t>(left, 4);
        }
}

#endif

// Attends from `group` queries of one row to its tokens [first, stop) under one KV head. Writes the largest score, the sum of the
// exponentials and the weighted sum of the values of every query.
template <typename T>
void attend_chunk(const T* q, int64_t q_head_stride, int64_t group, const Pages<T>& pages, int64_t kv_head,
                  const int32_t* table, int64_t first, int64_t stop, float scale, float cap, float* top, float* mass,
                  float* sums) {
    int64_t key_dim = pages.key_dim, value_dim = pages.value_dim, count = stop - first;
    thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < group * (key_dim + kChunk)) memory.resize(size_t(group * (key_dim + kChunk)));
    float* queries = memory.data();
    float* scores = queries + group * key_dim;
    for (int64_t g = 0; g < group; ++g)
#pragma omp simd
        for (int64_t d = 0; d < key_dim; ++d) queries[g * key_dim + d] = load(q[g * q_head_stride + d]) * scale;

    const T* keys[kChunk];
    const T* values[kChunk];
    int64_t block = first / pages.block_size, within = first % pages.block_size;
    for (int64_t t = 0; t < count; ++block, within = 0) {
        int64_t slot = kv_head * pages.num_slots + int64_t(table[block]) * pages.block_size + within;
        const T* key = pages.keys + slot * key_dim;
        const T* value = pages.values + slot * value_dim;
        for (; within < pages.block_size && t < count; ++within, ++t, key += key_dim, value += value_dim) {
            keys[t] = key;
            values[t] = value;
        }
    }
    score(queries, group, keys, count, key_dim, scores);
    for (int64_t g = 0; g < group; ++g) softmax(scores + g * kChunk, count, cap, top + g, mass + g);
    weigh(scores, group, values, count, value_dim, sums);
}

// Decode attention: one query token a row. A task is one chunk of the tokens of one row under one KV head; the chunks of a row
// are merged in their order. lse [rows, q_heads] may be null; sinks [q_heads] may be null.
template <typename T>
void paged_attention(const T* q, int64_t q_row_stride, int64_t q_head_stride, const Pages<T>& pages, const int32_t* tables,
                     int64_t table_stride, const int32_t* firsts, const int32_t* stops, float scale, float cap,
                     const float* sinks, T* out, float* lse, int64_t rows, int64_t q_heads, int64_t kv_heads) {
    int64_t group = q_heads / kv_heads, value_dim = pages.value_dim;
    struct Task {
        int64_t row, kv_head, first, stop;
    };
    thread_local std::vector<Task> tasks;
    thread_local std::vector<float> memory;
    tasks.clear();
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head)
            for (int64_t first = firsts[row]; first < stops[row]; first += kChunk)
                tasks.push_back({row, kv_head, first, std::min(first + kChunk, int64_t(stops[row]))});
    int64_t num_tasks = int64_t(tasks.size()), partial = group * (value_dim + 2);
    if (int64_t(memory.size()) < num_tasks * partial) memory.resize(size_t(num_tasks * partial));
    const Task* all = tasks.data();
    float* partials = memory.data();

#pragma omp parallel for schedule(dynamic) if (num_tasks > 1)
    for (int64_t at = 0; at < num_tasks; ++at) {
        const Task& task = all[at];
        float* top = partials + at * partial;
        const T* query = q + task.row * q_row_stride + task.kv_head * group * q_head_stride;
        attend_chunk(query, q_head_stride, group, pages, task.kv_head, tables + task.row * table_stride, task.first, task.stop,
                     scale, cap, top, top + group, top + 2 * group);
    }

    thread_local std::vector<float> merged;
    merged.resize(size_t(value_dim));
    for (int64_t at = 0; at < num_tasks;) {
        int64_t end = at;
        while (end < num_tasks && all[end].row == all[at].row && all[end].kv_head == all[at].kv_head) ++end;
        for (int64_t g = 0; g < group; ++g) {
            int64_t head = all[at].kv_head * group + g, index = all[at].row * q_heads + head;
            float sink = sinks == nullptr ? -kInfinity : sinks[head], highest = sink, total = 0.0f;
            for (int64_t i = at; i < end; ++i) highest = std::max(highest, partials[i * partial + g]);
            std::fill(merged.begin(), merged.end(), 0.0f);
            for (int64_t i = at; i < end; ++i) {
                const float* part = partials + i * partial;
                float share = fast_exp(part[g] - highest);
                total += share * part[group + g];
                const float* sums = part + 2 * group + g * value_dim;
#pragma omp simd
                for (int64_t d = 0; d < value_dim; ++d) merged[size_t(d)] += share * sums[d];
            }
            if (lse != nullptr) lse[index] = highest + std::log(total);
            if (sinks != nullptr) total += fast_exp(sink - highest);
            T* to = out + index * value_dim;
#pragma omp simd
            for (int64_t d = 0; d < value_dim; ++d) store(to + d, merged[size_t(d)] / total);
        }
        at = end;
    }
}

#if defined(__AVX512BF16__)

// Linear layers in bfloat16. A packed weight holds blocks of 32 outputs by 32 inputs, each as two tiles of 16 outputs, in the form
// that the instructions read: 16 rows of 16 outputs by two consecutive inputs.
//
//     weight [outputs, inputs]  ->  [outputs / 32, inputs / 32, 2, 16 pairs of inputs, 16 outputs, 2 inputs]
//
// The blocks of 32 outputs are divided among threads. Each is read once from memory for all rows of x, up to kRowBlock; every sum
// runs over the inputs in the same order whatever the number of rows.

constexpr int64_t kSide = 32;               // outputs and inputs of a block
constexpr int64_t kBlock = kSide * kSide;   // elements of a block
constexpr int64_t kTile = kBlock / 2;       // elements of a tile
constexpr int64_t kRowBlock = 256;          // rows of x that are kept in the cache of a core

void pack_weight_of(const BFloat16* weight, BFloat16* packed, int64_t outputs, int64_t inputs) {
#pragma omp parallel for
    for (int64_t block = 0; block < outputs / kSide; ++block) {
        BFloat16* to = packed + block * kSide * inputs;
        for (int64_t k = 0; k < inputs; k += kSide)
            for (int64_t half = 0; half < 2; ++half)
                for (int64_t pair = 0; pair < 16; ++pair)
                    for (int64_t n = 0; n < 16; ++n, to += 2)
                        std::memcpy(to, weight + (block * kSide + half * 16 + n) * inputs + k + 2 * pair, 2 * sizeof *to);
    }
}

// Adds the bias to sums [16 outputs], and stores them rounded.
inline void finish(const float* sums, const BFloat16* bias, BFloat16* out) {
    __m512 value = _mm512_loadu_ps(sums);
    store16(out, bias == nullptr ? value : _mm512_add_ps(value, load16(bias)));
}

// Up to 8 rows of x times one block of 32 outputs, with vector instructions.
template <int ROWS>
void multiply_vectors(const BFloat16* x, int64_t x_stride, const BFloat16* block, int64_t inputs, float* sums) {
    __m512 totals[ROWS][2];
    for (int row = 0; row < ROWS; ++row) totals[row][0] = totals[row][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < inputs; k += kSide, block += kBlock)
        for (int64_t pair = 0; pair < 16; ++pair) {
            __m512bh low = (__m512bh)_mm512_loadu_si512(block + pair * 32);
            __m512bh high = (__m512bh)_mm512_loadu_si512(block + kTile + pair * 32);
            _mm_prefetch((const char*)(block + 4 * kBlock + pair * 32), _MM_HINT_T0);
            _mm_prefetch((const char*)(block + 4 * kBlock + kTile + pair * 32), _MM_HINT_T0);
            for (int row = 0; row < ROWS; ++row) {
                int32_t both;
                std::memcpy(&both, x + row * x_stride + k + 2 * pair, sizeof both);
                __m512bh value = (__m512bh)_mm512_set1_epi32(both);
                totals[row][0] = _mm512_dpbf16_ps(totals[row][0], low, value);
                totals[row][1] = _mm512_dpbf16_ps(totals[row][1], high, value);
            }
        }
    for (int row = 0; row < ROWS; ++row) {
        _mm512_storeu_ps(sums + row * kSide, totals[row][0]);
        _mm512_storeu_ps(sums + row * kSide + 16, totals[row][1]);
    }
}

void multiply_by_vectors(const BFloat16* x, int64_t x_stride, int64_t rows, const BFloat16* block, int64_t inputs, float* sums) {
    using Multiply = void (*)(const BFloat16*, int64_t, const BFloat16*, int64_t, float*);
    static constexpr Multiply kMultiply[] = {multiply_vectors<1>, multiply_vectors<2>, multiply_vectors<3>, multiply_vectors<4>,
                                             multiply_vectors<5>, multiply_vectors<6>, multiply_vectors<7>, multiply_vectors<8>};
    for (int64_t row = 0; row < rows; row += 8)
        kMultiply[std::min<int64_t>(rows - row, 8) - 1](x + row * x_stride, x_stride, block, inputs, sums + row * kSide);
}

#if defined(__AMX_BF16__)

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Whether this process may use the tile registers of AMX; the system has to allow it.
bool has_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return allowed;
}

// Shapes the registers: 0 to 3 sums, 4 and 5 rows of x, 6 and 7 weights.
void shape_tiles(int64_t upper, int64_t lower) {
    TileShapes shapes;
    int64_t rows[] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; ++tile) {
        shapes.bytes[tile] = rows[tile] ? 64 : 0;
        shapes.rows[tile] = uint8_t(rows[tile]);
    }
    _tile_loadconfig(&shapes);
}

inline void prefetch_block(const BFloat16* block) {
    for (int64_t line = 0; line < kBlock; line += 32) _mm_prefetch((const char*)(block + line), _MM_HINT_T0);
}

// Up to 32 rows of x times one block of 32 outputs, with tiles that `shape_tiles` has shaped. FETCH: the block comes from memory.
template <bool FETCH>
void multiply_tiles(const BFloat16* x, int64_t x_stride, int64_t rows, const BFloat16* block, int64_t inputs, float* sums) {
    int64_t x_bytes = x_stride * int64_t(sizeof *x);
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= 16) {
        for (int64_t k = 0; k < inputs; k += kSide, block += kBlock) {
            if (FETCH) prefetch_block(block + 4 * kBlock);
            _tile_loadd(4, x + k, x_bytes);
            _tile_loadd(6, block, 64);
            _tile_loadd(7, block + kTile, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        const BFloat16* lower = x + 16 * x_stride;
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < inputs; k += kSide, block += kBlock) {
            if (FETCH) prefetch_block(block + 4 * kBlock);
            _tile_loadd(4, x + k, x_bytes);
            _tile_loadd(6, block, 64);
            _tile_loadd(7, block + kTile, 64);
            _tile_loadd(5, lower + k, x_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums + 16 * kSide, kSide * sizeof(float));
        _tile_stored(3, sums + 16 * kSide + 16, kSide * sizeof(float));
    }
    _tile_stored(0, sums, kSide * sizeof(float));
    _tile_stored(1, sums + 16, kSide * sizeof(float));
}

#endif

void linear_of(const BFloat16* x, int64_t x_stride, const BFloat16* packed, const BFloat16* bias, BFloat16* out, int64_t rows,
               int64_t outputs, int64_t inputs) {
#if defined(__AMX_BF16__)
    const bool tiles = has_tiles();
#endif
#pragma omp parallel
    {
        alignas(64) float sums[kSide * kSide];
#if defined(__AMX_BF16__)
        int64_t shaped = 0;
#endif
        for (int64_t top = 0; top < rows; top += kRowBlock) {
            int64_t bottom = std::min(rows, top + kRowBlock);
#pragma omp for schedule(static) nowait
            for (int64_t n = 0; n < outputs; n += kSide) {
                const BFloat16* block = packed + n * inputs;
                for (int64_t row = top; row < bottom; row += kSide) {
                    int64_t count = std::min(bottom - row, kSide);
                    const BFloat16* from = x + row * x_stride;
#if defined(__AMX_BF16__)
                    if (tiles) {
                        if (shaped != count) shape_tiles(std::min<int64_t>(count, 16), std::max<int64_t>(count - 16, 0));
                        shaped = count;
                        if (row == top)
                            multiply_tiles<true>(from, x_stride, count, block, inputs, sums);
                        else
                            multiply_tiles<false>(from, x_stride, count, block, inputs, sums);
                    } else
#endif
                        multiply_by_vectors(from, x_stride, count, block, inputs, sums);
                    for (int64_t i = 0; i < count; ++i)
                        for (int64_t half = 0; half < kSide; half += 16)
                            finish(sums + i * kSide + half, bias == nullptr ? nullptr : bias + n + half,
                                   out + (row + i) * outputs + n + half);
                }
            }
        }
#if defined(__AMX_BF16__)
        if (shaped != 0) _tile_release();
#endif
    }
}

#endif

}  // namespace

extern "C" int has_linear() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

extern "C" void pack_weight([[maybe_unused]] const BFloat16* weight, [[maybe_unused]] BFloat16* packed,
                            [[maybe_unused]] int64_t outputs, [[maybe_unused]] int64_t inputs) {
#if defined(__AVX512BF16__)
    pack_weight_of(weight, packed, outputs, inputs);
#endif
}

extern "C" void linear([[maybe_unused]] const BFloat16* x, [[maybe_unused]] int64_t x_stride,
                       [[maybe_unused]] const BFloat16* packed, [[maybe_unused]] const BFloat16* bias,
                       [[maybe_unused]] BFloat16* out, [[maybe_unused]] int64_t rows, [[maybe_unused]] int64_t outputs,
                       [[maybe_unused]] int64_t inputs) {
#if defined(__AVX512BF16__)
    linear_of(x, x_stride, packed, bias, out, rows, outputs, inputs);
#endif
}

#define KERNELS(SUFFIX, TYPE)                                                                                                 \
    extern "C" void rms_norm_##SUFFIX(const TYPE* x, int64_t row_stride, int64_t head_stride, const TYPE* weight, float eps,   \
                                      TYPE* out, int64_t rows, int64_t heads, int64_t width) {                                \
        rms_norm(x, row_stride, head_stride, weight, eps, out, rows, heads, width);                                           \
    }                                                                                                                         \
    extern "C" void add_##SUFFIX(const TYPE* a, const TYPE* b, int64_t b_stride, TYPE* out, int64_t rows, int64_t width) {    \
        add(a, b, b_stride, out, rows, width);                                                                                \
    }                                                                                                                         \
    extern "C" void silu_mul_##SUFFIX(const TYPE* gate_up, int64_t stride, TYPE* out, int64_t rows, int64_t width) {           \
        silu_mul(gate_up, stride, out, rows, width);                                                                          \
    }                                                                                                                         \
    extern "C" void rotate_##SUFFIX(const TYPE* x, int64_t row_stride, int64_t head_stride, const float* cosines,              \
                                    const float* sines, TYPE* out, int64_t rows, int64_t heads, int64_t dim) {                \
        rotate(x, row_stride, head_stride, cosines, sines, out, rows, heads, dim);                                            \
    }                                                                                                                         \
    extern "C" void write_plane_##SUFFIX(const TYPE* x, int64_t row_stride, int64_t head_stride, const int64_t* slots,         \
                                         TYPE* plane, int64_t rows, int64_t heads, int64_t num_slots, int64_t dim) {          \
        write_plane(x, row_stride, head_stride, slots, plane, rows, heads, num_slots, dim);                                   \
    }                                                                                                                         \
    extern "C" void paged_attention_##SUFFIX(                                                                                 \
        const TYPE* q, int64_t q_row_stride, int64_t q_head_stride, const TYPE* keys, const TYPE* values, int64_t num_slots,  \
        int64_t block_size, int64_t key_dim, int64_t value_dim, const int32_t* tables, int64_t table_stride,                  \
        const int32_t* firsts, const int32_t* stops, float scale, float cap, const float* sinks, TYPE* out, float* lse,       \
        int64_t rows, int64_t q_heads, int64_t kv_heads) {                                                                    \
        Pages<TYPE> pages{keys, values, num_slots, block_size, key_dim, value_dim};                                           \
        paged_attention(q, q_row_stride, q_head_stride, pages, tables, table_stride, firsts, stops, scale, cap, sinks, out,   \
                        lse, rows, q_heads, kv_heads);                                                                        \
    }

KERNELS(bfloat16, BFloat16)
KERNELS(float32, float)

// One call of a recorded program: the number of its kernel (`library.py`, _NUMBERS), its integers and pointers in order, and its
// floats in order.
struct Call {
    int64_t kernel;
    int64_t is_float32;
    int64_t words[22];
    double floats[2];
};

namespace {

template <typename T>
T* at(int64_t word) {
    return reinterpret_cast<T*>(word);
}

template <typename T>
void run_call(const Call& call) {
    const int64_t* w = call.words;
    const float f0 = float(call.floats[0]), f1 = float(call.floats[1]);
    switch (call.kernel) {
        case 0:
            return rms_norm(at<T>(w[0]), w[1], w[2], at<T>(w[3]), f0, at<T>(w[4]), w[5], w[6], w[7]);
        case 1:
            return add(at<T>(w[0]), at<T>(w[1]), w[2], at<T>(w[3]), w[4], w[5]);
        case 2:
            return silu_mul(at<T>(w[0]), w[1], at<T>(w[2]), w[3], w[4]);
        case 3:
            return rotate(at<T>(w[0]), w[1], w[2], at<float>(w[3]), at<float>(w[4]), at<T>(w[5]), w[6], w[7], w[8]);
        case 4:
            return write_plane(at<T>(w[0]), w[1], w[2], at<int64_t>(w[3]), at<T>(w[4]), w[5], w[6], w[7], w[8]);
        case 5: {
            Pages<T> pages{at<T>(w[3]), at<T>(w[4]), w[5], w[6], w[7], w[8]};
            return paged_attention(at<T>(w[0]), w[1], w[2], pages, at<int32_t>(w[9]), w[10], at<int32_t>(w[11]),
                                   at<int32_t>(w[12]), f0, f1, at<float>(w[13]), at<T>(w[14]), at<float>(w[15]), w[16], w[17],
                                   w[18]);
        }
        case 6:
            return linear(at<BFloat16>(w[0]), w[1], at<BFloat16>(w[2]), at<BFloat16>(w[3]), at<BFloat16>(w[4]), w[5], w[6], w[7]);
    }
}

}  // namespace

extern "C" void run_calls(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (calls[i].is_float32)
            run_call<float>(calls[i]);
        else
            run_call<BFloat16>(calls[i]);
    }
}
