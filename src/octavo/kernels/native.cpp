// The CPU's kernels where torch has none that will do: what a step spends its time on when few tokens meet many weights.
//
// Compiled on the machine that runs it, by `native.py`, which is also where each function's arguments are explained;
// the names and the arithmetic are those of `reference.py`. Portable C++ with GCC's and Clang's vector types, which the
// compiler maps on whatever registers there are. Data are float32 or bfloat16, sums float32. Nothing is allocated
// across calls but scratch of each thread, and no pointer outlives a call.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

// -- numbers ----------------------------------------------------------------------------------------------------------

struct bfloat16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }

inline float wide(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

template <class T> inline T narrow(float x);

template <> inline float narrow<float>(float x) { return x; }

template <> inline bfloat16 narrow<bfloat16>(float x) {  // to the nearest, ties to even; a NaN stays one
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x != x ? 0x7fc0 : rounded)};
}

template <class T> inline float rounded(float x) { return wide(narrow<T>(x)); }

template <class V, class T> inline V load(const T *from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

inline float sum(Floats v) {
    float halves[LANES];
    memcpy(halves, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) halves[i] += halves[i + width];
    return halves[0];
}

// e^x for x <= 0, to 2e-7 of its value: 2^n by the exponent's bits, 2^f for f in [-1/2, 1/2] by its Taylor series. In
// this form compilers vectorise a loop of it, which they don't with the library's.
inline float exp_of_negative(float x) {
    float t = std::max(x, -87.0f) * 1.44269504f;
    float n = std::floor(t + 0.5f), f = (t - n) * 0.693147181f;
    float series = 1 + f * (1 + f * (0.5f + f * (0.166666667f + f * (0.0416666667f + f * (0.00833333333f + f * 0.00138888889f)))));
    int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : series * power;
}

// Scratch that stays with its thread, so that a call costs no allocation.
template <int USE> inline float *scratch(size_t size) {
    static thread_local std::vector<float> memory;
    if (memory.size() < size) memory.resize(size);
    return memory.data();
}

// Below so many numbers, waking another thread costs more than it saves.
constexpr long WORTH_A_THREAD = 1 << 15;

// -- products of few rows ---------------------------------------------------------------------------------------------

// Weights lie in tiles, each of some outputs for all inputs, so that a thread reads one run of memory and no sum ever
// crosses lanes:
//
//     bfloat16, 32 outputs a tile     input 0 1 of output 0, 0 1 of output 1, ... of output 31; then inputs 2 3; ...
//     int8, 64 outputs a tile         input 0 1 2 3 of output 0, ...              of output 63; then inputs 4 5 6 7; ...

constexpr int AHEAD = 4096;  // bytes: what is prefetched now is used about half a microsecond later
constexpr int BF16_TILE = 32, INT8_TILE = 64;

constexpr int MOST_ROWS = 4;  // of x at once: their sums are in registers, beside the weights that are being widened

// One tile times ROWS rows of x. x [ROWS, size], float32; sums [ROWS, tile / 16] of 16 outputs each.
template <int ROWS> void tile_product(const bfloat16 *tile, const float *x, long size, Floats (*sums)[2]) {
    Floats total[ROWS][2] = {};
    for (long k = 0; k < size; k += 2, tile += 2 * BF16_TILE) {
        __builtin_prefetch(reinterpret_cast<const char *>(tile) + AHEAD);
        __builtin_prefetch(reinterpret_cast<const char *>(tile) + AHEAD + 64);
        Words pairs[2] = {load<Words>(tile), load<Words>(tile + 2 * LANES)};
        Floats even[2] = {(Floats)(pairs[0] << 16), (Floats)(pairs[1] << 16)};
        Floats odd[2] = {(Floats)(pairs[0] & 0xffff0000u), (Floats)(pairs[1] & 0xffff0000u)};
        for (int row = 0; row < ROWS; row++) {
            Floats first = Floats{} + x[row * size + k], second = Floats{} + x[row * size + k + 1];
            for (int half = 0; half < 2; half++) total[row][half] += even[half] * first;
            for (int half = 0; half < 2; half++) total[row][half] += odd[half] * second;
        }
    }
    memcpy(sums, total, sizeof total);
}

template <int ROWS> void tile_product(const int8_t *tile, const float *x, long size, Floats (*sums)[4]) {
    Floats total[ROWS][4] = {};
    for (long k = 0; k < size; k += 4, tile += 4 * INT8_TILE) {
        Ints quads[4];
        for (int j = 0; j < 4; j++) {
            __builtin_prefetch(tile + AHEAD + 64 * j);
            quads[j] = load<Ints>(tile + 4 * LANES * j);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            Floats weights[4];
            for (int j = 0; j < 4; j++) weights[j] = __builtin_convertvector(quads[j] << (24 - 8 * i) >> 24, Floats);
            for (int row = 0; row < ROWS; row++) {
                Floats factor = Floats{} + x[row * size + k + i];
                for (int j = 0; j < 4; j++) total[row][j] += weights[j] * factor;
            }
        }
    }
    memcpy(sums, total, sizeof total);
}

template <class W, int PARTS, int ROWS = MOST_ROWS>
void tile_product_of(int rows, const W *tile, const float *x, long size, Floats (*sums)[PARTS]) {
    if constexpr (ROWS == 1)
        tile_product<1>(tile, x, size, sums);
    else if (rows == ROWS)
        tile_product<ROWS>(tile, x, size, sums);
    else
        tile_product_of<W, PARTS, ROWS - 1>(rows, tile, x, size, sums);
}

// y = x @ w.T * scale * x_scale + bias, from x in float32 [num_rows, padded_in].
template <class W, int TILE, class Y>
void tiled_product(const W *tiles, const float *x, const float *x_scale, const float *scale, const bfloat16 *bias, Y *y,
                   long num_rows, long padded_in, long num_out, int num_threads) {
    constexpr int PARTS = TILE / LANES;
    long num_tiles = (num_out + TILE - 1) / TILE;
    long share = std::max(1L, num_tiles / 32);  // small enough that a thread which is held up is not waited for long
#pragma omp parallel for schedule(dynamic, share) num_threads(num_threads)
    for (long t = 0; t < num_tiles; t++) {
        for (long first = 0; first < num_rows; first += MOST_ROWS) {
            int rows = std::min<long>(MOST_ROWS, num_rows - first);
            alignas(64) float sums[MOST_ROWS][TILE];
            tile_product_of<W, PARTS>(rows, tiles + t * TILE * padded_in, x + first * padded_in, padded_in,
                                      reinterpret_cast<Floats(*)[PARTS]>(sums));
            long width = std::min<long>(TILE, num_out - t * TILE);
            for (int row = 0; row < rows; row++) {
                float row_scale = x_scale ? x_scale[first + row] : 1.0f;
                Y *out = y + (first + row) * num_out + t * TILE;
                for (long i = 0; i < width; i++) {
                    float value = sums[row][i];
                    if (scale) value *= scale[t * TILE + i] * row_scale;
                    if (bias) value += wide(bias[t * TILE + i]);
                    out[i] = narrow<Y>(value);
                }
            }
        }
    }
}

// -- norms, activations, rope -----------------------------------------------------------------------------------------

// reference.rms_norm: rounded before the weight of x's dtype, not before one in float32.
template <class T, class W> inline void rms_norm_row(const float *x, const W *weight, float eps, long size, T *out) {
    Floats squares = {};
    long whole = size / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        Floats v = load<Floats>(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (long i = whole; i < size; i++) total += x[i] * x[i];
    float scale = 1.0f / std::sqrt(total / size + eps);
    for (long i = 0; i < size; i++) {
        float normed = x[i] * scale;
        out[i] = narrow<T>((std::is_same_v<T, W> ? rounded<T>(normed) : normed) * wide(weight[i]));
    }
}

template <class T, class W>
void add_rms_norm(const T *x, const T *residual, const W *weight, float eps, T *out, T *stream, long num_rows, long size,
                  int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * size > WORTH_A_THREAD)
    for (long row = 0; row < num_rows; row++) {
        float *sums = scratch<0>(size);
        for (long i = 0; i < size; i++) {
            float value = wide(x[row * size + i]);
            if (residual) {
                T total = narrow<T>(value + wide(residual[row * size + i]));
                stream[row * size + i] = total;
                value = wide(total);
            }
            sums[i] = value;
        }
        rms_norm_row(sums, weight, eps, size, out + row * size);
    }
}

template <class T> void silu_mul(const T *gate_up, T *out, long num_rows, long size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * size > WORTH_A_THREAD)
    for (long row = 0; row < num_rows; row++) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
        for (long i = 0; i < size; i++) {
            float g = wide(gate[i]), e = exp_of_negative(-std::fabs(g));
            out[row * size + i] = narrow<T>(g * (g < 0 ? e : 1.0f) / (1.0f + e) * wide(up[i]));
        }
    }
}

struct RopeWrite {
    const int64_t *positions, *slots;
    const float *cos_sin;
    float eps;
    long num_tokens, num_heads, num_kv_heads, head_dim;
    long q_stride, k_stride, v_stride;  // from token to token; a token's heads are neighbours
    long block_stride, block_size;      // of the layer's K and V, in elements; in tokens
};

// One head: normed where there is a weight, turned by its position's angles.
template <class T, class W>
inline void turn_head(const T *head, const W *norm, float eps, const float *cos_sin, long head_dim, T *out) {
    T *normed = reinterpret_cast<T *>(scratch<0>(2 * head_dim) + head_dim);
    if (norm) {
        float *values = scratch<0>(2 * head_dim);
        for (long i = 0; i < head_dim; i++) values[i] = wide(head[i]);
        rms_norm_row(values, norm, eps, head_dim, normed);
        head = normed;
    }
    long half = head_dim / 2;
    for (long i = 0; i < half; i++) {
        float a = wide(head[i]), b = wide(head[i + half]), c = cos_sin[i], s = cos_sin[i + half];
        out[i] = narrow<T>(a * c - b * s);
        out[i + half] = narrow<T>(b * c + a * s);
    }
}

template <class T, class W>
void rope_kv_write(const RopeWrite &r, const T *q, const T *k, const T *v, const W *q_norm, const W *k_norm,
                   T *q_out, T *kv_layer, int num_threads) {
    long row_size = r.block_size * r.head_dim;  // a head's K or V in a block
    bool worth = r.num_tokens * (r.num_heads + 2 * r.num_kv_heads) * r.head_dim > WORTH_A_THREAD;
#pragma omp parallel for num_threads(num_threads) if (worth)
    for (long t = 0; t < r.num_tokens; t++) {
        const float *cos_sin = r.cos_sin + r.positions[t] * r.head_dim;
        for (long h = 0; h < r.num_heads; h++)
            turn_head(q + t * r.q_stride + h * r.head_dim, q_norm, r.eps, cos_sin, r.head_dim,
                      q_out + (t * r.num_heads + h) * r.head_dim);
        T *place = kv_layer + r.slots[t] / r.block_size * r.block_stride + r.slots[t] % r.block_size * r.head_dim;
        for (long h = 0; h < r.num_kv_heads; h++) {
            turn_head(k + t * r.k_stride + h * r.head_dim, k_norm, r.eps, cos_sin, r.head_dim, place + h * row_size);
            memcpy(place + (r.num_kv_heads + h) * row_size, v + t * r.v_stride + h * r.head_dim,
                   r.head_dim * sizeof(T));
        }
    }
}

// -- attention of single queries --------------------------------------------------------------------------------------

struct Attention {
    const int64_t *rows;      // [num_seqs] each sequence's row of q
    const int32_t *seq_lens;  // [num_seqs]
    const int32_t *tables;    // [num_seqs, table_width]
    float scale;
    long num_seqs, table_width, window, num_kv_heads, group, head_dim, block_size, block_stride;
};

constexpr long PART_KEYS = 512;  // keys that one task attends to: long contexts are shared among threads
constexpr int MOST_GROUP = 16, MOST_HEAD_DIM = 256, MOST_BLOCK = 256;

template <class T> inline void widen(const T *from, long size, float *to) {
    for (long i = 0; i < size; i++) to[i] = wide(from[i]);
}

// Softmax in progress over keys [first, last) of one sequence and one K/V head, for the query heads that share it.
// part [group, head_dim + 2]: the values weighted by exp(score - highest), then highest, then the sum of the weights.
template <class T>
void attend_part(const Attention &a, const T *q, const T *kv_layer, long seq, long head, long first, long last, float *part) {
    alignas(64) float query[MOST_GROUP][MOST_HEAD_DIM], weighted[MOST_GROUP][MOST_HEAD_DIM] = {};
    alignas(64) float row[MOST_HEAD_DIM] = {}, scores[MOST_GROUP][MOST_BLOCK];
    float highest[MOST_GROUP], total[MOST_GROUP];
    long padded = (a.head_dim + LANES - 1) / LANES * LANES;  // with zeros, which add nothing
    for (long g = 0; g < a.group; g++) {
        const T *from = q + ((a.rows[seq] * a.num_kv_heads + head) * a.group + g) * a.head_dim;
        memset(query[g], 0, sizeof query[g]);
        for (long i = 0; i < a.head_dim; i++) query[g][i] = wide(from[i]) * a.scale;
        highest[g] = -INFINITY, total[g] = 0;
    }
    const int32_t *table = a.tables + seq * a.table_width;
    for (long begin = first; begin < last;) {
        long block = begin / a.block_size, end = std::min(last, (block + 1) * a.block_size), count = end - begin;
        const T *keys = kv_layer + table[block] * a.block_stride + (head * a.block_size + begin % a.block_size) * a.head_dim;
        const T *values = keys + a.num_kv_heads * a.block_size * a.head_dim;
        for (long j = 0; j < count; j++) {
            widen(keys + j * a.head_dim, a.head_dim, row);
            for (long g = 0; g < a.group; g++) {
                Floats dot = {};
                for (long i = 0; i < padded; i += LANES) dot += load<Floats>(row + i) * load<Floats>(query[g] + i);
                scores[g][j] = sum(dot);
            }
        }
        for (long g = 0; g < a.group; g++) {
            float best = *std::max_element(scores[g], scores[g] + count);
            if (best > highest[g]) {
                float shrink = exp_of_negative(highest[g] - best);
                total[g] *= shrink, highest[g] = best;
                for (long i = 0; i < padded; i++) weighted[g][i] *= shrink;
            }
            for (long j = 0; j < count; j++) scores[g][j] = exp_of_negative(scores[g][j] - highest[g]);
            for (long j = 0; j < count; j++) total[g] += scores[g][j];
        }
        for (long j = 0; j < count; j++) {
            widen(values + j * a.head_dim, a.head_dim, row);
            for (long g = 0; g < a.group; g++)
                for (long i = 0; i < padded; i++) weighted[g][i] += scores[g][j] * row[i];
        }
        begin = end;
    }
    for (long g = 0; g < a.group; g++, part += a.head_dim + 2) {
        memcpy(part, weighted[g], a.head_dim * sizeof(float));
        part[a.head_dim] = highest[g], part[a.head_dim + 1] = total[g];
    }
}

// reference.merge_attention of a query head's parts, `stride` floats apart; there is at least one key in each.
template <class T>
void merge_parts(const float *parts, long num_parts, long stride, long head_dim, T *out, float *lse) {
    float highest = -INFINITY, total = 0;
    for (long p = 0; p < num_parts; p++) highest = std::max(highest, parts[p * stride + head_dim]);
    alignas(64) float weighted[MOST_HEAD_DIM] = {};
    for (long p = 0; p < num_parts; p++) {
        const float *part = parts + p * stride;
        float share = exp_of_negative(part[head_dim] - highest);
        total += share * part[head_dim + 1];
        for (long i = 0; i < head_dim; i++) weighted[i] += share * part[i];
    }
    for (long i = 0; i < head_dim; i++) out[i] = narrow<T>(weighted[i] / total);
    if (lse) *lse = highest + std::log(total);
}

template <class T>
void decode_attention(const Attention &a, const T *q, const T *kv_layer, T *out, float *lse, int num_threads) {
    struct Task {
        long seq, head, first, last;
    };
    std::vector<Task> tasks;
    std::vector<long> firsts;  // [num_seqs * num_kv_heads + 1] each pair's first task
    long num_keys = 0;
    for (long s = 0; s < a.num_seqs; s++) {
        long start = a.window ? std::max(0L, a.seq_lens[s] - a.window) : 0;
        num_keys += a.seq_lens[s] - start;
        for (long h = 0; h < a.num_kv_heads; h++) {
            firsts.push_back(tasks.size());
            for (long first = start; first < a.seq_lens[s]; first += PART_KEYS)
                tasks.push_back({s, h, first, std::min<long>(first + PART_KEYS, a.seq_lens[s])});
        }
    }
    firsts.push_back(tasks.size());
    long head_size = a.head_dim + 2, part_size = a.group * head_size;
    float *parts = scratch<1>(tasks.size() * part_size);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_keys * a.num_kv_heads * a.head_dim > WORTH_A_THREAD)
    for (size_t i = 0; i < tasks.size(); i++)
        attend_part(a, q, kv_layer, tasks[i].seq, tasks[i].head, tasks[i].first, tasks[i].last, parts + i * part_size);
    for (long pair = 0; pair + 1 < long(firsts.size()); pair++) {
        if (firsts[pair] == firsts[pair + 1]) continue;  // padding: nothing to attend to
        long seq = pair / a.num_kv_heads, head = pair % a.num_kv_heads;
        for (long g = 0; g < a.group; g++) {
            long place = (a.rows[seq] * a.num_kv_heads + head) * a.group + g;
            merge_parts(parts + firsts[pair] * part_size + g * head_size, firsts[pair + 1] - firsts[pair], part_size,
                        a.head_dim, out + place * a.head_dim, lse ? lse + place : nullptr);
        }
    }
}

}  // namespace

// -- what native.py calls ---------------------------------------------------------------------------------------------

#define EXPORT extern "C" __attribute__((visibility("default"))) void

EXPORT linear_bf16(const bfloat16 *tiles, const bfloat16 *x, const bfloat16 *bias, void *y, int wide_y, long num_rows,
                   long num_in, long padded_in, long num_out, int num_threads) {
    float *wide_x = scratch<2>(num_rows * padded_in);
    for (long row = 0; row < num_rows; row++) {
        widen(x + row * num_in, num_in, wide_x + row * padded_in);
        std::fill(wide_x + row * padded_in + num_in, wide_x + (row + 1) * padded_in, 0.0f);
    }
    auto call = [&](auto *out) {
        tiled_product<bfloat16, BF16_TILE>(tiles, wide_x, nullptr, nullptr, bias, out, num_rows, padded_in, num_out, num_threads);
    };
    wide_y ? call(static_cast<float *>(y)) : call(static_cast<bfloat16 *>(y));
}

EXPORT linear_int8(const int8_t *tiles, const int8_t *x, const float *x_scale, const float *scale, const bfloat16 *bias,
                   void *y, int wide_y, long num_rows, long num_in, long padded_in, long num_out, int num_threads) {
    float *wide_x = scratch<2>(num_rows * padded_in);
    for (long row = 0; row < num_rows; row++) {
        for (long i = 0; i < num_in; i++) wide_x[row * padded_in + i] = x[row * num_in + i];
        std::fill(wide_x + row * padded_in + num_in, wide_x + (row + 1) * padded_in, 0.0f);
    }
    auto call = [&](auto *out) {
        tiled_product<int8_t, INT8_TILE>(tiles, wide_x, x_scale, scale, bias, out, num_rows, padded_in, num_out, num_threads);
    };
    wide_y ? call(static_cast<float *>(y)) : call(static_cast<bfloat16 *>(y));
}

// The largest of a row becomes 127.
EXPORT quantize_rows_bf16(const bfloat16 *x, int8_t *out, float *scale, long num_rows, long size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * size > WORTH_A_THREAD)
    for (long row = 0; row < num_rows; row++) {
        float most = 0;
        for (long i = 0; i < size; i++) most = std::max(most, std::fabs(wide(x[row * size + i])));
        scale[row] = most / 127;
        float inverse = most > 0 ? 127 / most : 0;
        for (long i = 0; i < size; i++) out[row * size + i] = int8_t(std::nearbyint(wide(x[row * size + i]) * inverse));
    }
}

#define EXPORT_FOR(T, NAME)                                                                                                  \
    EXPORT add_rms_norm_##NAME(const T *x, const T *residual, const void *weight, int wide_weight, float eps, T *out,        \
                               T *stream, long num_rows, long size, int num_threads) {                                       \
        if (wide_weight)                                                                                                     \
            add_rms_norm(x, residual, static_cast<const float *>(weight), eps, out, stream, num_rows, size, num_threads);    \
        else                                                                                                                 \
            add_rms_norm(x, residual, static_cast<const T *>(weight), eps, out, stream, num_rows, size, num_threads);        \
    }                                                                                                                        \
    EXPORT silu_mul_##NAME(const T *gate_up, T *out, long num_rows, long size, int num_threads) {                            \
        silu_mul(gate_up, out, num_rows, size, num_threads);                                                                 \
    }                                                                                                                        \
    EXPORT rope_kv_write_##NAME(const RopeWrite *shape, const T *q, const T *k, const T *v, const void *q_norm,              \
                                const void *k_norm, int wide_norm, T *q_out, T *kv_layer, int num_threads) {                 \
        if (wide_norm)                                                                                                       \
            rope_kv_write(*shape, q, k, v, static_cast<const float *>(q_norm), static_cast<const float *>(k_norm), q_out,    \
                          kv_layer, num_threads);                                                                            \
        else                                                                                                                 \
            rope_kv_write(*shape, q, k, v, static_cast<const T *>(q_norm), static_cast<const T *>(k_norm), q_out, kv_layer,  \
                          num_threads);                                                                                      \
    }                                                                                                                        \
    EXPORT decode_attention_##NAME(const Attention *shape, const T *q, const T *kv_layer, T *out, float *lse,                \
                                   int num_threads) {                                                                        \
        decode_attention(*shape, q, kv_layer, out, lse, num_threads);                                                        \
    }

EXPORT_FOR(float, f32)
EXPORT_FOR(bfloat16, bf16)
