// The CPU's kernels where torch has none that will do: what a step spends its time on when few tokens meet many
// weights.
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
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));

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

template <class T> inline void widen(const T *from, long size, float *to) {
    for (long i = 0; i < size; i++) to[i] = wide(from[i]);
}

template <class V, class T> inline V load(const T *from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

// The numbers of one register as float32: those of bfloat16, twice as many, as the even ones and then the odd ones.
// What sums over all, or is put back in order in the end, does not mind.
template <class T> constexpr int WIDTH = 4 * LANES / sizeof(T);
template <class T> constexpr int PARTS = WIDTH<T> / LANES;

inline void spread(const float *from, Floats *to) { to[0] = load<Floats>(from); }

inline void spread(const bfloat16 *from, Floats *to) {
    Words pairs = load<Words>(from);
    to[0] = (Floats)(pairs << 16), to[1] = (Floats)(pairs & 0xffff0000u);
}

inline Floats broadcast(float x) { return x - Floats{}; }  // a sum with 0 would be computed

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Halves of runs of lanes added: of a in the lower half of each run of twice as many, of b in the upper.
inline Floats fold_8(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

inline Floats fold_4(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}

inline Floats fold_2(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

inline Floats fold_1(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// The sums of 16 vectors, a lane each, in 15 foldings: v[0] and v[8] share a vector first, then v[4] and v[12], ...
inline Floats sums_of(const Floats *v) {
    Floats eight[8], four[4];
    for (int i = 0; i < 8; i++) eight[i] = fold_8(v[i], v[i + 8]);
    for (int i = 0; i < 4; i++) four[i] = fold_4(eight[i], eight[i + 4]);
    return fold_1(fold_2(four[0], four[2]), fold_2(four[1], four[3]));
}

inline float sum(Floats v) {
    Floats folded = fold_8(v, v);
    folded = fold_4(folded, folded), folded = fold_2(folded, folded), folded = fold_1(folded, folded);
    return folded[0];
}

// e^x for x <= 0, to 2e-7 of its value: 2^n by the exponent's bits, 2^f for f in [-1/2, 1/2] by its Taylor series. In
// this form compilers vectorise a loop of it, which they don't with the library's.
inline float exp_of_negative(float x) {
    float t = std::max(x, -87.0f) * 1.44269504f;
    float n = std::floor(t + 0.5f), f = (t - n) * 0.693147181f;
    float series = 0.00138888889f;
    for (float term : {0.00833333333f, 0.0416666667f, 0.166666667f, 0.5f, 1.0f, 1.0f}) series = series * f + term;
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
//     bfloat16, 32 or 64 outputs a tile     input 0 1 of output 0, 0 1 of output 1, ...; then inputs 2 3; ...
//     int8, 64 outputs a tile               input 0 1 2 3 of output 0, ... of output 63; then inputs 4 5 6 7; ...

constexpr int AHEAD = 4096;  // bytes: what is prefetched now is used about half a microsecond later
constexpr int INT8_TILE = 64;

constexpr int MOST_ROWS = 4;  // of x at once: their sums are in registers, beside the weights that are being widened

// One tile times ROWS rows of x. x [ROWS, size], float32; sums [ROWS, SIXTEENS] of 16 outputs each.
template <int ROWS, int SIXTEENS>
void tile_product(const bfloat16 *tile, const float *x, long size, Floats (*sums)[SIXTEENS]) {
    Floats total[ROWS][SIXTEENS] = {};
    for (long k = 0; k < size; k += 2, tile += 2 * LANES * SIXTEENS) {
        Floats weights[SIXTEENS][2];  // of 16 outputs, for the first input and the second
        for (int j = 0; j < SIXTEENS; j++) {
            __builtin_prefetch(reinterpret_cast<const char *>(tile) + AHEAD + 64 * j);
            spread(tile + 2 * LANES * j, weights[j]);
        }
        for (int row = 0; row < ROWS; row++) {
            Floats first = broadcast(x[row * size + k]), second = broadcast(x[row * size + k + 1]);
            for (int j = 0; j < SIXTEENS; j++) total[row][j] += weights[j][0] * first;
            for (int j = 0; j < SIXTEENS; j++) total[row][j] += weights[j][1] * second;
        }
    }
    memcpy(sums, total, sizeof total);
}

// Four bytes of weights in each lane, 0 1 2 3 of its output, times the four of a word of x, added to that lane's sum.
#ifdef __AVX512VNNI__
// The instruction wants one factor without a sign: 128 more than the weight, which comes off again in `settled`.
struct ByteSums {
    Ints total[4] = {}, offset = {};

    void add(const Ints *weights, int32_t x) {
        auto factors = (__m512i)(Ints{} + x), signs = (__m512i)(Ints{} + int32_t(0x80808080));
        offset = (Ints)_mm512_dpbusd_epi32((__m512i)offset, signs, factors);
        for (int j = 0; j < 4; j++)
            total[j] = (Ints)_mm512_dpbusd_epi32((__m512i)total[j], (__m512i)weights[j] ^ signs, factors);
    }
    Ints settled(int j) const { return total[j] - offset; }
};
#else
// In 16 bits, where processors have twice as many lanes as in 32: two products of bytes from -127 to 127 fit together.
struct ByteSums {
    Ints total[4] = {};

    void add(const Ints *weights, int32_t x) {
        Shorts factors = (Shorts)(Ints{} + x), even = factors << 8 >> 8, odd = factors >> 8;
        for (int j = 0; j < 4; j++) {
            Shorts pairs = (Shorts)weights[j];
            Ints both = (Ints)((pairs << 8 >> 8) * even + (pairs >> 8) * odd);
            total[j] += (both << 16 >> 16) + (both >> 16);
        }
    }
    Ints settled(int j) const { return total[j]; }
};
#endif

// x [ROWS, size / 4]: the bytes of a row, four to a word.
template <int ROWS, int SIXTEENS>
void tile_product(const int8_t *tile, const int32_t *x, long size, Floats (*sums)[SIXTEENS]) {
    static_assert(SIXTEENS * LANES == INT8_TILE);
    ByteSums rows[ROWS];
    for (long k = 0; k < size / 4; k++, tile += 4 * INT8_TILE) {
        Ints weights[4];
        for (int j = 0; j < 4; j++) {
            __builtin_prefetch(tile + AHEAD + 64 * j);
            weights[j] = load<Ints>(tile + 64 * j);
        }
        for (int row = 0; row < ROWS; row++) rows[row].add(weights, x[row * size / 4 + k]);
    }
    for (int row = 0; row < ROWS; row++)
        for (int j = 0; j < 4; j++) sums[row][j] = __builtin_convertvector(rows[row].settled(j), Floats);
}

template <class W, class X, int SIXTEENS, int ROWS = MOST_ROWS>
void tile_product_of(int rows, const W *tile, const X *x, long size, Floats (*sums)[SIXTEENS]) {
    if constexpr (ROWS == 1)
        tile_product<1, SIXTEENS>(tile, x, size, sums);
    else if (rows == ROWS)
        tile_product<ROWS, SIXTEENS>(tile, x, size, sums);
    else
        tile_product_of<W, X, SIXTEENS, ROWS - 1>(rows, tile, x, size, sums);
}

// y = x @ w.T * scale * x_scale + bias; a row of x takes x_stride numbers.
template <class W, int TILE, class X, class Y>
void tiled_product(const W *tiles, const X *x, long x_stride, const float *x_scale, const float *scale,
                   const bfloat16 *bias, Y *y, long num_rows, long padded_in, long num_out, int num_threads) {
    constexpr int SIXTEENS = TILE / LANES;
    long num_tiles = (num_out + TILE - 1) / TILE;
    // A run of tiles for each thread: what is prefetched past a tile's end is used.
#pragma omp parallel for num_threads(num_threads)
    for (long t = 0; t < num_tiles; t++) {
        for (long first = 0; first < num_rows; first += MOST_ROWS) {
            int rows = std::min<long>(MOST_ROWS, num_rows - first);
            alignas(64) float sums[MOST_ROWS][TILE];
            tile_product_of<W, X, SIXTEENS>(rows, tiles + t * TILE * padded_in, x + first * x_stride, padded_in,
                                      reinterpret_cast<Floats(*)[SIXTEENS]>(sums));
            long width = std::min<long>(TILE, num_out - t * TILE);
            for (int row = 0; row < rows; row++) {
                float row_scale = scale ? x_scale[first + row] : 1.0f;
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

struct Linear {
    const void *tiles;
    const bfloat16 *x;   // [num_rows, num_in]
    const float *scale;  // [num_out], of int8
    const bfloat16 *bias;
    void *y;  // [num_rows, num_out], float32 or bfloat16
    long num_rows, num_in, padded_in, num_out;
    int wide_y, num_threads;
};

// The largest of a row becomes 127 -> what undoes it.
inline float quantize_row(const bfloat16 *x, long size, int8_t *out) {
    uint16_t bits = 0;  // without signs they are in the order of the numbers, NaN above all: a row with one has no scale
    for (long i = 0; i < size; i++) bits = std::max(bits, uint16_t(x[i].bits & 0x7fff));
    float most = wide(bfloat16{bits});
    float inverse = most > 0 ? 127 / most : 0;
    for (long i = 0; i < size; i++) out[i] = int8_t(std::nearbyint(wide(x[i]) * inverse));
    return most / 127;
}

template <class W, int TILE, class X> void multiply(const Linear &a, const X *x, long x_stride, const float *x_scale) {
    auto into = [&](auto *y) {
        tiled_product<W, TILE>(static_cast<const W *>(a.tiles), x, x_stride, x_scale, a.scale, a.bias, y, a.num_rows,
                               a.padded_in, a.num_out, a.num_threads);
    };
    a.wide_y ? into(static_cast<float *>(a.y)) : into(static_cast<bfloat16 *>(a.y));
}

template <int TILE> void linear(const Linear &a) {
    float *x = scratch<2>(a.num_rows * a.padded_in);
    for (long row = 0; row < a.num_rows; row++) {
        widen(a.x + row * a.num_in, a.num_in, x + row * a.padded_in);
        std::fill(x + row * a.padded_in + a.num_in, x + (row + 1) * a.padded_in, 0.0f);
    }
    multiply<bfloat16, TILE>(a, x, a.padded_in, nullptr);
}

void quantized_linear(const Linear &a) {
    float *x_scale = scratch<2>(a.num_rows * (a.padded_in / 4 + 1));  // and behind them the rows
    auto *bytes = reinterpret_cast<int8_t *>(x_scale + a.num_rows);
    for (long row = 0; row < a.num_rows; row++) {
        int8_t *out = bytes + row * a.padded_in;
        x_scale[row] = quantize_row(a.x + row * a.num_in, a.num_in, out);
        std::fill(out + a.num_in, out + a.padded_in, int8_t(0));
    }
    multiply<int8_t, INT8_TILE>(a, reinterpret_cast<const int32_t *>(bytes), a.padded_in / 4, x_scale);
}

struct Quantize {
    const bfloat16 *x;  // [num_rows, size]
    int8_t *out;
    float *scale;  // [num_rows]
    long num_rows, size;
    int num_threads;
};

struct Embed {
    const int64_t *token_ids;
    const void *tiles;
    const float *scale;  // of int8
    bfloat16 *out;       // [num_tokens, size]
    long num_tokens, size, padded;
};

// Rows of a tiled weight.
template <class W, int TILE, int INPUTS> void embed(const Embed &a) {
    for (long t = 0; t < a.num_tokens; t++) {
        long token = a.token_ids[t];
        const W *tile = static_cast<const W *>(a.tiles) + token / TILE * TILE * a.padded + token % TILE * INPUTS;
        for (long i = 0; i < a.size; i++) {
            W value = tile[i / INPUTS * TILE * INPUTS + i % INPUTS];
            if constexpr (std::is_same_v<W, int8_t>)
                a.out[t * a.size + i] = narrow<bfloat16>(value * a.scale[token]);
            else
                a.out[t * a.size + i] = value;
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

struct Norm {
    const void *x, *residual, *weight;  // residual may be null
    void *out, *stream;
    float eps;
    long num_rows, size;
    int wide_weight, num_threads;
};

template <class T, class W> void add_rms_norm(const Norm &a) {
    auto *x = static_cast<const T *>(a.x), *residual = static_cast<const T *>(a.residual);
    auto *weight = static_cast<const W *>(a.weight);
    auto *out = static_cast<T *>(a.out), *stream = static_cast<T *>(a.stream);
    long num_rows = a.num_rows, size = a.size;
#pragma omp parallel for num_threads(a.num_threads) if (num_rows * size > WORTH_A_THREAD)
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
        rms_norm_row(sums, weight, a.eps, size, out + row * size);
    }
}

struct Gate {
    const void *gate_up;  // [num_rows, 2 * size]
    void *out;            // [num_rows, size]
    long num_rows, size;
    int num_threads;
};

template <class T> void silu_mul(const Gate &a) {
    auto *gate_up = static_cast<const T *>(a.gate_up);
    auto *out = static_cast<T *>(a.out);
    long num_rows = a.num_rows, size = a.size;
#pragma omp parallel for num_threads(a.num_threads) if (num_rows * size > WORTH_A_THREAD)
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
    const void *q, *k, *v, *q_norm, *k_norm;
    void *q_out, *kv_layer;
    int wide_norm, num_threads;
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

template <class T, class W> void rope_kv_write(const RopeWrite &r) {
    auto *q = static_cast<const T *>(r.q), *k = static_cast<const T *>(r.k), *v = static_cast<const T *>(r.v);
    auto *q_norm = static_cast<const W *>(r.q_norm), *k_norm = static_cast<const W *>(r.k_norm);
    auto *q_out = static_cast<T *>(r.q_out), *kv_layer = static_cast<T *>(r.kv_layer);
    long row_size = r.block_size * r.head_dim;  // a head's K or V in a block
    bool worth = r.num_tokens * (r.num_heads + 2 * r.num_kv_heads) * r.head_dim > WORTH_A_THREAD;
#pragma omp parallel for num_threads(r.num_threads) if (worth)
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
    const void *q, *kv_layer;
    void *out;
    float *lse;  // may be null
    int num_threads;
};

constexpr long PART_KEYS = 512;  // keys that one task attends to: long contexts are shared among threads
constexpr int MOST_GROUP = 16, MOST_HEAD_DIM = 256;
constexpr int CHUNK = LANES;   // keys at once: a lane each for their scores
constexpr int MOST_HEADS = 4;  // query heads at once: what is loaded of K and V serves all of them

// The query heads that share a K/V head, and their softmax in progress: over the keys so far, the values weighted by
// exp(score - highest), and the sum of the weights. Rows are as `spread` leaves them.
struct Heads {
    alignas(64) float query[MOST_GROUP][MOST_HEAD_DIM], weighted[MOST_GROUP][MOST_HEAD_DIM];
    float highest[MOST_GROUP], total[MOST_GROUP];
};

// Numbers from i on of a row of `size`, zeros behind its end; WHOLE: the end is not among them.
template <bool WHOLE, class T> inline void spread_row(const T *row, long i, long size, Floats *to) {
    if constexpr (WHOLE) return spread(row + i, to);
    alignas(64) T padded[WIDTH<T>] = {};
    memcpy(padded, row + i, std::min<long>(WIDTH<T>, size - i) * sizeof(T));
    spread(padded, to);
}

// Keys [0, n) of a block, for HEADS heads from `first` on.
template <int HEADS, bool WHOLE, class T>
void attend_chunk(Heads &heads, int first, const T *keys, const T *values, long n, long size) {
    Floats products[HEADS][CHUNK] = {};
    for (long j = 0; j < n; j++) {
        Floats sums[HEADS] = {};
        for (long i = 0; i < size; i += WIDTH<T>) {
            Floats key[PARTS<T>];
            spread_row<WHOLE>(keys + j * size, i, size, key);
            for (int h = 0; h < HEADS; h++)
                for (int p = 0; p < PARTS<T>; p++)
                    sums[h] += key[p] * load<Floats>(heads.query[first + h] + i + p * LANES);
        }
        for (int h = 0; h < HEADS; h++) products[h][j] = sums[h];
    }
    alignas(64) float weights[HEADS][CHUNK];
    for (int h = 0; h < HEADS; h++) {
        Floats scores = sums_of(products[h]);
        memcpy(weights[h], &scores, sizeof scores);
        std::fill(weights[h] + n, weights[h] + CHUNK, -INFINITY);
        float &highest = heads.highest[first + h], &total = heads.total[first + h];
        float best = *std::max_element(weights[h], weights[h] + n);
        if (!(best <= highest)) {
            float shrink = exp_of_negative(highest - best);
            total *= shrink, highest = best;
            for (float &weighted : heads.weighted[first + h]) weighted *= shrink;
        }
        for (int j = 0; j < CHUNK; j++) weights[h][j] = exp_of_negative(weights[h][j] - highest);
        total += sum(load<Floats>(weights[h]));
    }
    for (long i = 0; i < size; i += WIDTH<T>) {
        Floats weighted[HEADS][PARTS<T>];
        for (int h = 0; h < HEADS; h++) memcpy(weighted[h], heads.weighted[first + h] + i, sizeof weighted[h]);
        for (long j = 0; j < n; j++) {
            Floats value[PARTS<T>];
            spread_row<WHOLE>(values + j * size, i, size, value);
            for (int h = 0; h < HEADS; h++)
                for (int p = 0; p < PARTS<T>; p++) weighted[h][p] += value[p] * broadcast(weights[h][j]);
        }
        for (int h = 0; h < HEADS; h++) memcpy(heads.weighted[first + h] + i, weighted[h], sizeof weighted[h]);
    }
}

template <bool WHOLE, class T>
void attend_chunk_of(int num_heads, Heads &heads, int first, const T *keys, const T *values, long n, long size) {
    switch (num_heads) {
        case 1: return attend_chunk<1, WHOLE>(heads, first, keys, values, n, size);
        case 2: return attend_chunk<2, WHOLE>(heads, first, keys, values, n, size);
        case 3: return attend_chunk<3, WHOLE>(heads, first, keys, values, n, size);
        default: return attend_chunk<MOST_HEADS, WHOLE>(heads, first, keys, values, n, size);
    }
}

// Keys [first, last) of one sequence and one K/V head -> part [group, head_dim + 2]: weighted, highest, total.
template <class T>
void attend_part(const Attention &a, const T *q, const T *kv_layer, long seq, long head, long first, long last,
                 float *part) {
    Heads heads;
    long row_size = a.block_size * a.head_dim;  // a head's K or V in a block
    for (long g = 0; g < a.group; g++) {
        const T *from = q + ((a.rows[seq] * a.num_kv_heads + head) * a.group + g) * a.head_dim;
        for (long i = 0; i < a.head_dim; i += WIDTH<T>) {
            Floats lanes[PARTS<T>];
            spread_row<false>(from, i, a.head_dim, lanes);
            for (int p = 0; p < PARTS<T>; p++) lanes[p] *= broadcast(a.scale);
            memcpy(heads.query[g] + i, lanes, sizeof lanes);
        }
        memset(heads.weighted[g], 0, sizeof heads.weighted[g]);
        heads.highest[g] = -INFINITY, heads.total[g] = 0;
    }
    auto attend = a.head_dim % WIDTH<T> ? attend_chunk_of<false, T> : attend_chunk_of<true, T>;
    auto keys_at = [&](long key) {
        long block = a.tables[seq * a.table_width + key / a.block_size];
        return kv_layer + block * a.block_stride + head * row_size + key % a.block_size * a.head_dim;
    };
    for (long begin = first, end; begin < last; begin = end) {
        end = std::min({last, (begin / a.block_size + 1) * a.block_size, begin + CHUNK});
        const T *keys = keys_at(begin), *values = keys + a.num_kv_heads * row_size;
        if (end < last) {
            auto *next = reinterpret_cast<const char *>(keys_at(end));
            for (long i = 0; i < CHUNK * a.head_dim * long(sizeof(T)); i += 64) {
                __builtin_prefetch(next + i, 0, 2);
                __builtin_prefetch(next + a.num_kv_heads * row_size * sizeof(T) + i, 0, 2);
            }
        }
        for (int g = 0; g < a.group; g += MOST_HEADS)
            attend(std::min<int>(MOST_HEADS, a.group - g), heads, g, keys, values, end - begin, a.head_dim);
    }
    for (long g = 0; g < a.group; g++, part += a.head_dim + 2) {
        for (long i = 0; i < a.head_dim; i++) {  // as they were before they were spread
            long within = i % WIDTH<T>;
            part[i] = heads.weighted[g][i - within + within % PARTS<T> * LANES + within / PARTS<T>];
        }
        part[a.head_dim] = heads.highest[g], part[a.head_dim + 1] = heads.total[g];
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

template <class T> void decode_attention(const Attention &a) {
    auto *q = static_cast<const T *>(a.q), *kv_layer = static_cast<const T *>(a.kv_layer);
    auto *out = static_cast<T *>(a.out);
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
    bool worth = num_keys * a.num_kv_heads * a.head_dim > WORTH_A_THREAD;
#pragma omp parallel for schedule(dynamic) num_threads(a.num_threads) if (worth)
    for (size_t i = 0; i < tasks.size(); i++)
        attend_part(a, q, kv_layer, tasks[i].seq, tasks[i].head, tasks[i].first, tasks[i].last, parts + i * part_size);
    for (long pair = 0; pair + 1 < long(firsts.size()); pair++) {
        if (firsts[pair] == firsts[pair + 1]) continue;  // padding: nothing to attend to
        long seq = pair / a.num_kv_heads, head = pair % a.num_kv_heads;
        for (long g = 0; g < a.group; g++) {
            long place = (a.rows[seq] * a.num_kv_heads + head) * a.group + g;
            merge_parts(parts + firsts[pair] * part_size + g * head_size, firsts[pair + 1] - firsts[pair], part_size,
                        a.head_dim, out + place * a.head_dim, a.lse ? a.lse + place : nullptr);
        }
    }
}

// -- sampling ---------------------------------------------------------------------------------------------------------

// A draw is a race (`reference.sample`): each token's score is its logit / temperature minus the logarithm of a waiting
// time, and the largest wins. Two logarithms for each token of a vocabulary would take most of a small model's step, but
// few tokens can win: a waiting time is at least the uniform number that it is made of, and the logarithm of that is at
// least its binary exponent's. Only who beats the leader with that gets an exact score: some dozens.

constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15, MIX_1 = 0xbf58476d1ce4e5b9, MIX_2 = 0x94d049bb133111eb;
constexpr long LAP = 128;  // tokens between two looks at who leads

inline float uniform_of(uint32_t bits) { return (float(bits) + 0.5f) * 0x1p-32f; }

inline float least_log_wait(uint32_t bits) {
    float uniform = uniform_of(bits);
    int32_t word;
    memcpy(&word, &uniform, sizeof word);
    return 0.6931472f * float((word >> 23) - 127) - 1e-3f;  // less what rounding may make of the exact one
}

inline float log_wait(uint32_t bits) {
    return std::log(-std::log1p(-std::min(uniform_of(bits), 1.0f - 0x1p-24f)));
}

struct Race {
    const void *logits;        // [num_rows, size]
    const float *temperature;  // [num_rows], each above 0
    const int64_t *keys;       // [num_rows], of the noise
    int64_t *token_ids;        // [num_rows], who wins
    long num_rows, size;
    int num_threads;
};

template <class T> long winner_of(const T *logits, long size, float temperature, uint64_t key) {
    float lead = -INFINITY, scores[LAP];
    uint32_t bits[LAP];
    long winner = 0;
    for (long begin = 0; begin < size; begin += LAP) {
        long count = std::min(LAP, size - begin);
        for (long i = 0; i < count; i++) {  // SplitMix64's upper half, `reference.exponential_noise`
            uint64_t z = key + uint64_t(begin + i + 1) * GOLDEN;
            z = (z ^ (z >> 30)) * MIX_1;
            z = (z ^ (z >> 27)) * MIX_2;
            bits[i] = uint32_t(z >> 32);
        }
        int num_hopeful = 0;
        for (long i = 0; i < count; i++) {
            scores[i] = wide(logits[begin + i]) / temperature;
            num_hopeful += scores[i] - least_log_wait(bits[i]) > lead;
        }
        for (long i = 0; num_hopeful && i < count; i++) {
            if (!(scores[i] - least_log_wait(bits[i]) > lead)) continue;
            float score = scores[i] - log_wait(bits[i]);
            if (score > lead) lead = score, winner = begin + i;
        }
    }
    return winner;
}

template <class T> void race(const Race &a) {
    auto *logits = static_cast<const T *>(a.logits);
#pragma omp parallel for num_threads(a.num_threads) if (a.num_rows > 1)
    for (long row = 0; row < a.num_rows; row++)
        a.token_ids[row] = winner_of(logits + row * a.size, a.size, a.temperature[row], uint64_t(a.keys[row]));
}

}  // namespace

// -- what native.py calls ---------------------------------------------------------------------------------------------

// Each takes one pointer, to a struct of its arguments, so that calls can be written down and done again.

#define EXPORT extern "C" __attribute__((visibility("default"))) void

EXPORT linear_bf16_32(const Linear *a) { linear<32>(*a); }
EXPORT linear_bf16_64(const Linear *a) { linear<64>(*a); }
EXPORT linear_int8_64(const Linear *a) { quantized_linear(*a); }
EXPORT embed_bf16_32(const Embed *a) { embed<bfloat16, 32, 2>(*a); }
EXPORT embed_bf16_64(const Embed *a) { embed<bfloat16, 64, 2>(*a); }
EXPORT embed_plain(const Embed *a) { embed<bfloat16, 1, 2>(*a); }  // a tile of one row is a row
EXPORT embed_int8_64(const Embed *a) { embed<int8_t, INT8_TILE, 4>(*a); }

EXPORT quantize_rows(const Quantize *a) {
#pragma omp parallel for num_threads(a->num_threads) if (a->num_rows * a->size > WORTH_A_THREAD)
    for (long row = 0; row < a->num_rows; row++)
        a->scale[row] = quantize_row(a->x + row * a->size, a->size, a->out + row * a->size);
}

#define EXPORT_FOR(T, NAME)                                                         \
    EXPORT add_rms_norm_##NAME(const Norm *a) {                                     \
        a->wide_weight ? add_rms_norm<T, float>(*a) : add_rms_norm<T, T>(*a);       \
    }                                                                               \
    EXPORT silu_mul_##NAME(const Gate *a) { silu_mul<T>(*a); }                      \
    EXPORT rope_kv_write_##NAME(const RopeWrite *a) {                               \
        a->wide_norm ? rope_kv_write<T, float>(*a) : rope_kv_write<T, T>(*a);       \
    }                                                                               \
    EXPORT decode_attention_##NAME(const Attention *a) { decode_attention<T>(*a); } \
    EXPORT race_##NAME(const Race *a) { race<T>(*a); }

EXPORT_FOR(float, f32)
EXPORT_FOR(bfloat16, bf16)

struct Call {
    void (*function)(const void *);
    const void *arguments;
};

EXPORT replay(const Call *calls, long num_calls) {
    for (long i = 0; i < num_calls; i++) calls[i].function(calls[i].arguments);
}
