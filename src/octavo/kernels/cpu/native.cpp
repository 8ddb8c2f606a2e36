// CPU kernels for operations that torch lacks or computes slowly: those of a decode step, which multiplies few tokens
// with many weights.
//
// `native.py` compiles this file on the machine that runs it and documents the arguments of each function. Names and
// arithmetic are those of `kernels/reference`. Portable C++ with vector types of GCC and Clang, which the compiler maps
// to the processor's registers. Data are float32 or bfloat16, sums float32. Between calls, only each thread's scratch
// memory is kept, and no pointer outlives a call.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "team.h"

namespace {

// The lanes of a register: compilers keep wider vectors in memory.
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
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

template <> inline bfloat16 narrow<bfloat16>(float x) {  // to nearest, ties to even; keeps NaN
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x != x ? 0x7fc0 : rounded)};
}

template <class T> inline float rounded(float x) { return wide(narrow<T>(x)); }

// The same for each lane: bfloat16 in the upper halves.
inline Words narrow(Floats x) {
    Words bits = (Words)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    return x != x ? Words{} + 0x7fc00000 : rounded;
}

template <class T> inline Floats rounded(Floats x) {
    if constexpr (std::is_same_v<T, float>) return x;
    else return (Floats)(narrow(x) & 0xffff0000u);
}

template <class T> inline void widen(const T *from, long size, float *to) {
    for (long i = 0; i < size; i++) to[i] = wide(from[i]);
}

template <class V, class T> inline V load(const T *from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

// The numbers of one register as float32. A register of bfloat16 has twice as many: first the even ones, then the odd
// ones. Callers sum over all of them or restore the order at the end.
template <class T> constexpr int WIDTH = 4 * LANES / sizeof(T);
template <> constexpr int WIDTH<int8_t> = LANES;  // a quarter of a register: bytes have no shift to float32
template <class T> constexpr int PARTS = WIDTH<T> / LANES;

// Sums over a row have this many columns whatever the registers: with 8, their roundings would weigh twice as much.
constexpr int COLUMNS = 16, SUMS = COLUMNS / LANES;
template <class T> constexpr int STEP = WIDTH<T> < COLUMNS ? COLUMNS : WIDTH<T>;  // numbers that fill all columns

inline Floats fold_columns(Floats *sums) {
    for (int half = SUMS / 2; half; half /= 2)
        for (int n = 0; n < half; n++) sums[n] += sums[n + half];
    return sums[0];
}

inline void spread(const float *from, Floats *to) { to[0] = load<Floats>(from); }

inline void spread(const bfloat16 *from, Floats *to) {
    Words pairs = load<Words>(from);
    to[0] = (Floats)(pairs << 16), to[1] = (Floats)(pairs & 0xffff0000u);
}

inline void spread(const int8_t *from, Floats *to) {
#if LANES == 16
    to[0] = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif LANES == 8
    to[0] = (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    for (int i = 0; i < LANES; i++) to[0][i] = from[i];
#endif
}

// The inverse of `spread`; numbers are rounded.
inline void join(const Floats *from, float *to) { memcpy(to, from, sizeof *from); }

inline void join(const Floats *from, bfloat16 *to) {
    Words pairs = narrow(from[0]) >> 16 | (narrow(from[1]) & 0xffff0000u);
    memcpy(to, &pairs, sizeof pairs);
}

inline Floats broadcast(float x) { return x - Floats{}; }  // `x + Floats{}` would compute an addition

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// `fold_N` adds the two halves of each run of 2 * N lanes: sums of a in the lower half of the run, of b in the upper half.
// `sums_of` folds LANES vectors to one with the sum of each in a lane: with 16 lanes, v[0] and v[8] share a vector first,
// then v[4] and v[12], ...
#if LANES == 16
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

inline Floats sums_of(const Floats *v) {
    Floats eight[8], four[4];
    for (int i = 0; i < 8; i++) eight[i] = fold_8(v[i], v[i + 8]);
    for (int i = 0; i < 4; i++) four[i] = fold_4(eight[i], eight[i + 4]);
    return fold_1(fold_2(four[0], four[2]), fold_2(four[1], four[3]));
}
#elif LANES == 8
inline Floats fold_4(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

inline Floats fold_2(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

inline Floats fold_1(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}

inline Floats sums_of(const Floats *v) {
    Floats four[4];
    for (int i = 0; i < 4; i++) four[i] = fold_4(v[i], v[i + 4]);
    return fold_1(fold_2(four[0], four[2]), fold_2(four[1], four[3]));
}
#else
inline Floats fold_2(Floats a, Floats b) { return SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7); }

inline Floats fold_1(Floats a, Floats b) { return SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7); }

inline Floats sums_of(const Floats *v) { return fold_1(fold_2(v[0], v[2]), fold_2(v[1], v[3])); }
#endif

inline float sum(Floats v) {
#if LANES == 16
    v = fold_8(v, v);
#endif
#if LANES >= 8
    v = fold_4(v, v);
#endif
    v = fold_2(v, v);
    return fold_1(v, v)[0];
}

// Compilers do not vectorise a loop for the largest number: the order of NaN and zeros would differ.
inline Floats larger(Floats a, Floats b) { return a < b ? b : a; }

inline float largest(Floats v) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = std::max(best, v[i]);
    return best;
#endif
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline Words bits_of(Floats x) { return (Words)x; }

// e^x for -87 <= x <= 87, of a number or of each lane: 2^n by the exponent's bits, 2^f for f in [-1/2, 1/2] by a
// polynomial with a relative error of 1e-7. Compilers vectorise loops of it, unlike loops of the library's exp.
template <class V> inline V exp_within(V x) {
    constexpr float ROUND = 0x1.8p23f + 127;  // a sum with it has no fraction, and n + 127 in its lowest bits
    V t = x * 1.44269504f, shifted = t + ROUND, f = t - (shifted - ROUND), series = V{} + 0.00132647273f;
    for (float term : {0.00967151299f, 0.0555073358f, 0.240222424f, 0.693147004f, 1.0f}) series = series * f + term;
    auto bits = bits_of(shifted) << 23;
    V power;
    memcpy(&power, &bits, sizeof power);
    return series * power;
}

// e^x for x <= 0, and up to 87; below -87 it is 0.
template <class V> inline V exp_of_negative(V x) {
    V power = exp_within(x < -87.0f ? V{} - 87.0f : x);
    return x < -87.0f ? V{} : power;
}

// Rows of sums -> numbers of their dtype.
inline void narrow_row(const float *from, long size, float *to) { memcpy(to, from, size * sizeof *from); }

inline void narrow_row(const float *from, long size, bfloat16 *to) {
    long i = 0;
#ifdef __AVX512BF16__
    for (; i + 32 <= size; i += 32) {  // subnormal numbers become 0, as in the product
        auto numbers = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
        memcpy(to + i, &numbers, sizeof numbers);
    }
#endif
    for (; i < size; i++) {
        auto number = narrow<bfloat16>(from[i]);
        memcpy(to + i, &number, sizeof number);  // `words` reads pairs
    }
}

// Scratch memory of a thread, kept between calls to avoid allocations. It begins at a cache line.
template <int USE> inline float *scratch(size_t size) {
    struct alignas(64) Line {
        float numbers[16];
    };
    static thread_local std::vector<Line> memory;
    if (memory.size() * 16 < size) memory.resize((size + 15) / 16);
    return reinterpret_cast<float *>(memory.data());
}

// Below this many numbers, waking another thread costs more than it saves.
constexpr long WORTH_A_THREAD = 1 << 15;

// -- products ---------------------------------------------------------------------------------------------------------

// Weights are stored in tiles of some outputs and all inputs. So a thread reads contiguous memory, and no sum crosses
// lanes.
//
//     bfloat16, 32 or 64 outputs a tile     input 0 1 of output 0, 0 1 of output 1, ...; then inputs 2 3; ...
//
// A step reads one word of 4 bytes of each output and of each row of x. The sums of a row are added in the order of its
// inputs in every batch, so its result always has the same bits.

// Bytes of a tile that are multiplied with all rows while they are in the second-level cache. Meanwhile, the next ones
// are prefetched to it. Smaller steps would fit the first level, but loading and storing sums takes more than they save.
constexpr long STEP_BYTES = 128 << 10;
constexpr long MAX_CHUNK = 256;  // rows of x at a time: their sums stay in the second-level cache

// Words of a register, and registers of outputs in one pass over the rows.
#if defined(__AVX512BW__)
constexpr int WORDS = 16, GROUPS = 4;
#elif defined(__AVX2__)
constexpr int WORDS = 8, GROUPS = 2;
#else
constexpr int WORDS = 4, GROUPS = 2;
#endif
typedef float FloatWords __attribute__((vector_size(4 * WORDS)));
typedef int32_t IntWords __attribute__((vector_size(4 * WORDS)));
typedef uint32_t UintWords __attribute__((vector_size(4 * WORDS)));
typedef int16_t ShortWords __attribute__((vector_size(4 * WORDS)));

// The product of words of weights and a word of x, for one instruction set.

#ifdef __AVX512BF16__
#define BFLOAT16_INSTRUCTIONS "vdpbf16ps"
struct Bfloat16Words {
    typedef bfloat16 Weight;
    typedef uint32_t X;
    typedef __m512bh Weights, Factor;
    static constexpr int ROWS = 6;

    static void words(const float *from, long size, X *to) {
        narrow_row(from, size, reinterpret_cast<bfloat16 *>(to));
    }
    static Weights weights(const char *line) { return (Weights)load<IntWords>(line); }
    static Factor factor(X x) { return (Factor)(IntWords{} + int32_t(x)); }
    static FloatWords add(FloatWords sum, Weights w, Factor x) { return (FloatWords)_mm512_dpbf16_ps((__m512)sum, w, x); }
};
#else
#define BFLOAT16_INSTRUCTIONS "float32"
struct Bfloat16Words {
    typedef bfloat16 Weight;
    typedef struct {
        float first, second;
    } X;
    typedef struct {
        FloatWords first, second;
    } Weights, Factor;
    static constexpr int ROWS = 5;

    static void words(const float *from, long size, X *to) { memcpy(to, from, size * sizeof *from); }
    static Weights weights(const char *line) {
        auto pairs = load<UintWords>(line);
        return {(FloatWords)(pairs << 16), (FloatWords)(pairs & 0xffff0000u)};
    }
    static Factor factor(X x) { return {x.first - FloatWords{}, x.second - FloatWords{}}; }
    static FloatWords add(FloatWords sum, Weights w, Factor x) { return sum + w.first * x.first + w.second * x.second; }
};
#endif

// Rows that are multiplied as one block if there are no more: the sums of half a tile fill the registers.
template <class K> constexpr int FEW_ROWS = WORDS == 16 ? 14 : K::ROWS;

// Add `count` steps of ROWS rows and NUM registers of outputs to sums [ROWS, TILE]. Each step prefetches `lines` cache
// lines of 64 bytes from `ahead` on.
template <class K, int TILE, int ROWS, int NUM>
void take_steps(const char *tile, const typename K::X *x, long x_stride, long count, FloatWords *sums,
                const char *ahead, long lines) {
    FloatWords total[ROWS][NUM];
    for (int row = 0; row < ROWS; row++)
        for (int j = 0; j < NUM; j++) total[row][j] = sums[row * (TILE / WORDS) + j];
    for (long k = 0; k < count; k++, tile += 4 * TILE) {
        for (long i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        typename K::Weights weights[NUM];
        for (int j = 0; j < NUM; j++) weights[j] = K::weights(tile + 4 * WORDS * j);
        for (int row = 0; row < ROWS; row++) {
            auto factor = K::factor(x[row * x_stride + k]);
            for (int j = 0; j < NUM; j++) total[row][j] = K::add(total[row][j], weights[j], factor);
        }
    }
    // Unrolled, so that the compiler keeps `total` in registers all the time.
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
        for (int j = 0; j < NUM; j++) sums[row * (TILE / WORDS) + j] = total[row][j];
}

// `take_steps` for all outputs of a tile and up to FEW_ROWS rows. The passes over the outputs share the prefetch.
template <class K, int TILE, int ROWS = FEW_ROWS<K>>
void take_rows(int rows, const char *tile, const typename K::X *x, long x_stride, long count, FloatWords *sums,
               const char *ahead, long lines) {
    constexpr int NUM = std::min(ROWS <= K::ROWS ? GROUPS : 2, TILE / WORDS), PASSES = TILE / WORDS / NUM;
    if constexpr (ROWS > 1)
        if (rows < ROWS) return take_rows<K, TILE, ROWS - 1>(rows, tile, x, x_stride, count, sums, ahead, lines);
    lines = (lines + PASSES - 1) / PASSES;
    for (int j = 0; j < TILE / WORDS; j += NUM, ahead += 64 * lines * count)
        take_steps<K, TILE, ROWS, NUM>(tile + 4 * WORDS * j, x, x_stride, count, sums + j, ahead, lines);
}

struct Linear {
    const void *tiles;
    const bfloat16 *x;  // [num_rows, num_in]
    const bfloat16 *bias;
    void *y;  // [num_rows, num_out] with y_stride numbers from row to row, float32 or bfloat16
    long num_rows, num_in, padded_in, num_out, y_stride;
    int float32_out, num_threads;
};

// Rows of x as words for a product: row i begins at words + i * stride.
template <class K> struct Rows {
    const typename K::X *words;
    long stride;
};

// y = x @ w.T + bias, rows [first, last).
template <class K, int TILE, class Y> void tiled_product(const Linear &a, const Rows<K> &x, long first, long last, Y *y) {
    constexpr long LINES = TILE * 4 / 64;
    long num_tiles = (a.num_out + TILE - 1) / TILE, num_steps = (a.num_in + 1) / 2;
    long num_chunks = (last - first + MAX_CHUNK - 1) / MAX_CHUNK;
    constexpr long max_count = STEP_BYTES / (4 * TILE);
    // Each thread computes consecutive tiles, so data prefetched beyond the end of a tile are used.
    parallel_for(num_chunks * num_tiles, a.num_threads, [&](long task) {
        long t = task % num_tiles, begin = task / num_tiles * MAX_CHUNK;
        long num_rows = std::min(MAX_CHUNK, last - first - begin);
        long block_rows = num_rows <= FEW_ROWS<K> ? FEW_ROWS<K> : K::ROWS;
        long num_blocks = (num_rows + block_rows - 1) / block_rows;
        bool reads_once = num_rows <= K::ROWS && TILE / WORDS <= GROUPS;
        bool keeps_sums = num_blocks > 1 && num_steps > max_count;
        auto *tile = static_cast<const char *>(a.tiles) + t * TILE * a.padded_in * 2;
        alignas(64) FloatWords few[FEW_ROWS<K> * TILE / WORDS];
        FloatWords *sums = keeps_sums ? reinterpret_cast<FloatWords *>(scratch<3>(num_rows * TILE)) : nullptr;
        long width = std::min<long>(TILE, a.num_out - t * TILE);
        const bfloat16 *bias = a.bias ? a.bias + t * TILE : nullptr;
        for (long k = 0; k < num_steps; k += max_count) {
            long count = std::min(max_count, num_steps - k);
            const char *now = tile + k * 4 * TILE;
            for (long block = 0; block < num_blocks; block++) {
                // Of the next steps. The processor itself sees best what comes where all is read once, in order.
                long lines = reads_once ? 0 : (LINES + num_blocks - 1) / num_blocks;
                const char *ahead = now + count * 4 * TILE + block * lines * count * 64;
                if (block * lines >= LINES) lines = 0;
                long row = block * block_rows, rows = std::min<long>(block_rows, num_rows - row);
                FloatWords *own = keeps_sums ? sums + row * (TILE / WORDS) : few;
                if (!k) std::fill_n(own, rows * (TILE / WORDS), FloatWords{});
                Y *out = y + (first + begin + row) * a.y_stride + t * TILE;
                bool is_last = k + count == num_steps;
                for (long r = 0; is_last && r < rows; r++)  // stores would wait for their lines, and products for stores
                    for (long i = 0; i < TILE; i += 64 / sizeof(Y)) __builtin_prefetch(out + r * a.y_stride + i, 1);
                take_rows<K, TILE>(rows, now, x.words + (begin + row) * x.stride + k, x.stride, count, own, ahead, lines);
                for (long r = 0; is_last && r < rows; r++) {
                    alignas(64) float values[TILE];
                    memcpy(values, own + r * (TILE / WORDS), sizeof values);
                    for (long i = 0; bias && i < width; i++) values[i] += wide(bias[i]);
                    narrow_row(values, width, out + r * a.y_stride);
                }
            }
        }
    });
}

// True if rows of x are words already.
template <class K> bool has_words(const Linear &a) { return sizeof(typename K::X) == sizeof(float) && a.num_in % 2 == 0; }

// Rows of x as words, `stride` words each; converted in scratch memory if they are none, and padded with zeros.
template <class K> Rows<K> words_of(const Linear &a, const bfloat16 *x, long num_rows) {
    long stride = (a.num_in + 1) / 2;
    constexpr long FLOATS = sizeof(typename K::X) / sizeof(float);
    if (has_words<K>(a)) return {reinterpret_cast<const typename K::X *>(x), stride};
    float *memory = scratch<2>(num_rows * stride * FLOATS);
    parallel_for(num_rows, num_rows * a.num_in > WORTH_A_THREAD ? a.num_threads : 1, [&](long row) {
        const bfloat16 *from = x + row * a.num_in;
        float *to = memory + row * stride * FLOATS;
        if (stride) memset(to + (stride - 1) * FLOATS, 0, FLOATS * sizeof(float));
        if constexpr (FLOATS == 2)
            widen(from, a.num_in, to);
        else
            memcpy(to, from, a.num_in * sizeof *from);
    });
    return {reinterpret_cast<const typename K::X *>(memory), stride};
}

template <class K, int TILE> void linear(const Linear &a) {
    // A chunk for each thread, so that none waits for another's tile in between; converted rows stay in the cache.
    long step = has_words<K>(a) ? MAX_CHUNK * a.num_threads : MAX_CHUNK;
    for (long first = 0; first < a.num_rows; first += step) {
        long last = std::min(a.num_rows, first + step);
        Rows<K> x = words_of<K>(a, a.x + first * a.num_in, last - first);
        if (a.float32_out)
            tiled_product<K, TILE>(a, x, first, last, static_cast<float *>(a.y));
        else
            tiled_product<K, TILE>(a, x, first, last, static_cast<bfloat16 *>(a.y));
    }
}

struct Embed {
    const int64_t *token_ids;
    const bfloat16 *tiles;
    bfloat16 *out;  // [num_tokens, size]
    long num_tokens, size, padded;
};

// Read rows of a tiled weight.
template <int TILE> void embed(const Embed &a) {
    for (long t = 0; t < a.num_tokens; t++) {
        long token = a.token_ids[t];
        const bfloat16 *tile = a.tiles + token / TILE * TILE * a.padded + token % TILE * 2;
        for (long i = 0; i < a.size; i++) a.out[t * a.size + i] = tile[i / 2 * TILE * 2 + i % 2];
    }
}

struct GatherColumns {
    const bfloat16 *x;     // [num_rows, size]
    const int32_t *order;  // [size]
    bfloat16 *out;
    long num_rows, size;
};

#include "grouped.h"
#include "experts.h"

// -- norms, activations, rope -----------------------------------------------------------------------------------------

// reference.rms_norm: rounds before a weight of x's dtype is applied, not before a float32 weight.
template <class T, class W> inline void rms_norm_row(const float *x, const W *weight, float eps, long size, T *out) {
    Floats squares[SUMS] = {};
    long whole = size / COLUMNS * COLUMNS;
    for (long i = 0; i < whole; i += COLUMNS)
        for (int n = 0; n < SUMS; n++) {
            Floats v = load<Floats>(x + i + n * LANES);
            squares[n] += v * v;
        }
    float total = sum(fold_columns(squares));
    for (long i = whole; i < size; i++) total += x[i] * x[i];
    float scale = 1.0f / std::sqrt(total / size + eps);
    for (long i = 0; i < size; i++) {
        float normed = x[i] * scale;
        out[i] = narrow<T>((std::is_same_v<T, W> ? rounded<T>(normed) : normed) * wide(weight[i]));
    }
}

struct Norm {
    const void *x, *residual, *weight;  // residual may be null
    void *out, *residual_out;
    float eps;
    long num_rows, size;
    int float32_weight, num_threads;
};

template <class T, class W> void add_rms_norm(const Norm &a) {
    auto *x = static_cast<const T *>(a.x), *residual = static_cast<const T *>(a.residual);
    auto *weight = static_cast<const W *>(a.weight);
    auto *out = static_cast<T *>(a.out), *residual_out = static_cast<T *>(a.residual_out);
    long num_rows = a.num_rows, size = a.size;
    parallel_for(num_rows, num_rows * size > WORTH_A_THREAD ? a.num_threads : 1, [&](long row) {
        float *sums = scratch<0>(size);
        widen(x + row * size, size, sums);
        if (residual) {
            const T *from = residual + row * size;
            T *to = residual_out + row * size;
            for (long i = 0; i < size; i++) to[i] = narrow<T>(sums[i] + wide(from[i]));
            widen(to, size, sums);
        }
        rms_norm_row(sums, weight, a.eps, size, out + row * size);
    });
}

struct Gate {
    const void *gate_up;  // [num_rows, 2 * size]
    void *out;            // [num_rows, size]
    long num_rows, size;
    int num_threads;
};

// activate(gate) * up
template <class T, class Activate> void gate_mul(const Gate &a, const Activate &activate) {
    auto *gate_up = static_cast<const T *>(a.gate_up);
    auto *out = static_cast<T *>(a.out);
    long num_rows = a.num_rows, size = a.size;
    auto take = [&](const T *gate, const T *up, T *to) {
        Floats gates[PARTS<T>], ups[PARTS<T>];
        spread(gate, gates), spread(up, ups);
        for (int p = 0; p < PARTS<T>; p++) gates[p] = activate(gates[p]) * ups[p];
        join(gates, to);
    };
    parallel_for(num_rows, num_rows * size > WORTH_A_THREAD ? a.num_threads : 1, [&](long row) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
        T *to = out + row * size;
        long i = 0;
        for (; i + WIDTH<T> <= size; i += WIDTH<T>) take(gate + i, up + i, to + i);
        if (i == size) return;
        T rest[3][WIDTH<T>] = {};
        std::copy(gate + i, gate + size, rest[0]), std::copy(up + i, up + size, rest[1]);
        take(rest[0], rest[1], rest[2]);
        std::copy_n(rest[2], size - i, to + i);
    });
}

// g / (1 + e^-x); 0 for x < -87
inline Floats sigmoid_times(Floats g, Floats x) {
    Floats low = Floats{} - 87.0f, high = Floats{} + 87.0f, bounded = x < low ? low : x;
    bounded = bounded > high ? high : bounded;
    Floats share = 1.0f / (1.0f + exp_within(-bounded));
    return g * (x < low ? Floats{} : share);
}

template <class T> void silu_mul(const Gate &a) {
    gate_mul<T>(a, [](Floats g) { return sigmoid_times(g, g); });
}

// The tanh approximation: x = 2 sqrt(2 / pi) (g + 0.044715 g^3). Rounded as torch rounds it.
template <class T> void gelu_mul(const Gate &a) {
    gate_mul<T>(a, [](Floats g) { return rounded<T>(sigmoid_times(g, 1.59576912f * (g + 0.044715f * g * g * g))); });
}

// torch's operations on numbers, of rows that may be apart.
struct Elementwise {
    void *out;
    const void *a, *b;  // [num_rows, size]; b is not read by all
    long num_rows, size, out_stride, a_stride, b_stride;
    float factor;
};

template <class T, class B = T, class Compute> void elementwise(const Elementwise &e, const Compute &compute) {
    for (long row = 0; row < e.num_rows; row++) {
        auto *out = static_cast<T *>(e.out) + row * e.out_stride;
        auto *a = static_cast<const T *>(e.a) + row * e.a_stride;
        auto *b = static_cast<const B *>(e.b) + row * e.b_stride;
        for (long i = 0; i < e.size; i++) out[i] = narrow<T>(compute(wide(a[i]), b + i));
    }
}

constexpr int MAX_HEAD_DIM = 512;

struct RopeWrite {
    const int64_t *positions, *slots;
    const float *cos_sin;
    float eps;
    long num_tokens, num_heads, num_kv_heads, head_dim;
    long q_stride, k_stride, v_stride;  // between tokens; the heads of a token are contiguous
    long block_stride, block_size;      // of kv_layer: in elements; in tokens
    const void *q, *k, *v, *q_norm, *k_norm;
    void *q_out, *kv_layer;
    int float32_norm, int8_kv, num_threads;
};

// A row is K or V of one head of one token, in the pool. reference.quantize_rows: an int8 row ends with its scale, a
// float16 of two bytes.
template <class R> constexpr int TAIL = std::is_same_v<R, int8_t> ? 2 : 0;

// Scales are not negative. Both conversions move the exponent's bias by a product, which also makes subnormal numbers
// right; what float16 cannot hold is infinite, and so is NaN.
inline uint16_t float16_of(float scale) {
    uint32_t bits;
    scale *= 0x1p-112f;
    memcpy(&bits, &scale, sizeof bits);
    return std::min<uint32_t>((bits + 0xfff + ((bits >> 13) & 1)) >> 13, 0x7c00);
}

inline float of_float16(uint16_t half) {
    uint32_t bits = uint32_t(half) << 13;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return half < 0x7c00 ? scale * 0x1p112f : INFINITY;
}

template <class T> inline void write_row(const T *x, long size, T *row) { memcpy(row, x, size * sizeof(T)); }

template <class T> inline void write_row(const T *x, long size, int8_t *row) {
    uint32_t largest = 0;  // as bits, for NaN to be the largest
    for (long i = 0; i < size; i++) {
        float value = std::fabs(wide(x[i]));
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        largest = std::max(largest, bits);
    }
    float highest;
    memcpy(&highest, &largest, sizeof highest);
    uint16_t half = float16_of(highest / 127);
    float scale = of_float16(half);
    for (long i = 0; i < size; i++) {
        float y = wide(x[i]) / scale;
        row[i] = int8_t(std::nearbyint(std::max(-127.0f, std::min(127.0f, y == y ? y : 0.0f))));
    }
    memcpy(row + size, &half, sizeof half);
}

// Rotary embedding of one head, after an RMS norm if there is a weight.
template <class T, class W>
inline void rotate_head(const T *head, const W *norm, float eps, const float *cos_sin, long head_dim, T *out) {
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

template <class T, class W, class R> void rope_kv_write(const RopeWrite &r) {
    auto *q = static_cast<const T *>(r.q), *k = static_cast<const T *>(r.k), *v = static_cast<const T *>(r.v);
    auto *q_norm = static_cast<const W *>(r.q_norm), *k_norm = static_cast<const W *>(r.k_norm);
    auto *q_out = static_cast<T *>(r.q_out);
    auto *kv_layer = static_cast<R *>(r.kv_layer);
    long width = r.head_dim + TAIL<R>, head_size = r.block_size * width;  // of a row; of a head's K or V in a block
    bool worth = r.num_tokens * (r.num_heads + 2 * r.num_kv_heads) * r.head_dim > WORTH_A_THREAD;
    parallel_for(r.num_tokens, worth ? r.num_threads : 1, [&](long t) {
        const float *cos_sin = r.cos_sin + r.positions[t] * r.head_dim;
        for (long h = 0; h < r.num_heads; h++)
            rotate_head(q + t * r.q_stride + h * r.head_dim, q_norm, r.eps, cos_sin, r.head_dim,
                        q_out + (t * r.num_heads + h) * r.head_dim);
        R *place = kv_layer + r.slots[t] / r.block_size * r.block_stride + r.slots[t] % r.block_size * width;
        for (long h = 0; h < r.num_kv_heads; h++) {
            T rotated[MAX_HEAD_DIM];
            rotate_head(k + t * r.k_stride + h * r.head_dim, k_norm, r.eps, cos_sin, r.head_dim, rotated);
            write_row(rotated, r.head_dim, place + h * head_size);
            write_row(v + t * r.v_stride + h * r.head_dim, r.head_dim, place + (r.num_kv_heads + h) * head_size);
        }
    });
}

// -- decode attention -------------------------------------------------------------------------------------------------

struct Attention {
    const int64_t *rows;      // [num_seqs], the row of q of each sequence; the first one, if it has several
    const int64_t *counts;    // [num_seqs], its queries; null: one
    const int32_t *seq_lens;  // [num_seqs]
    const int32_t *tables;    // [num_seqs, table_width]
    float scale;
    long num_seqs, table_width, window, num_kv_heads, group, head_dim, block_size, block_stride;
    const void *q, *kv_layer;
    void *out;
    float *lse;          // may be null
    const float *sinks;  // may be null
    int int8_kv, num_threads;
};

constexpr long PART_KEYS = 512;  // keys of one task: threads share long contexts
constexpr int MAX_GROUP_SIZE = 16;
constexpr int CHUNK = LANES;   // keys at a time: one lane for each score
constexpr int MAX_HEADS = 4;  // query heads at a time: they share the loads of K and V

// The query heads of one K/V head and the state of their online softmax: the sum of the values weighted by
// exp(score - highest), and the sum of the weights. Rows have the order of `spread`.
struct Heads {
    alignas(64) float query[MAX_GROUP_SIZE][MAX_HEAD_DIM], weighted[MAX_GROUP_SIZE][MAX_HEAD_DIM];
    float highest[MAX_GROUP_SIZE], total[MAX_GROUP_SIZE];
};

// The numbers from i on of a row of `size`, padded with zeros; WHOLE: no padding is needed.
template <bool WHOLE, class T> inline void spread_row(const T *row, long i, long size, Floats *to) {
    if constexpr (WHOLE) return spread(row + i, to);
    alignas(64) T padded[WIDTH<T>] = {};
    memcpy(padded, row + i, std::min<long>(WIDTH<T>, size - i) * sizeof(T));
    spread(padded, to);
}

// The scales of n int8 rows, `width` bytes apart.
inline Floats scales_of(const int8_t *tail, long width, long n) {
    uint16_t halves[CHUNK] = {};
    for (long j = 0; j < n; j++) memcpy(halves + j, tail + j * width, sizeof halves[j]);
    alignas(64) float scales[CHUNK];
    for (int j = 0; j < CHUNK; j++) scales[j] = of_float16(halves[j]);
    return load<Floats>(scales);
}

// Attention of HEADS heads from `first` on over keys [0, n) of a block. FIXED: the size, if it is known when this
// is compiled and small enough for the queries to stay in registers; else 0.
template <int HEADS, bool WHOLE, int FIXED, class T>
void attend_chunk(Heads &heads, int first, const T *keys, const T *values, long n, long size) {
    if constexpr (FIXED > 0) size = FIXED;
    long width = size + TAIL<T>;
    Floats products[HEADS][CHUNK] = {}, key_scales, value_scales;
    if constexpr (TAIL<T> > 0) key_scales = scales_of(keys + size, width, n), value_scales = scales_of(values + size, width, n);
    for (long j = 0; j < n; j++) {
        Floats sums[HEADS][SUMS] = {};
        for (long i = 0; i < size; i += STEP<T>)
            for (long at = i; at < (WHOLE ? i + STEP<T> : std::min(i + STEP<T>, size)); at += WIDTH<T>) {
                Floats key[PARTS<T>];
                spread_row<WHOLE>(keys + j * width, at, size, key);
                for (int h = 0; h < HEADS; h++)
                    for (int p = 0; p < PARTS<T>; p++)
                        sums[h][((at - i) / LANES + p) % SUMS] +=
                            key[p] * load<Floats>(heads.query[first + h] + at + p * LANES);
            }
        for (int h = 0; h < HEADS; h++) products[h][j] = fold_columns(sums[h]);
    }
    alignas(64) float weights[HEADS][CHUNK];
    for (int h = 0; h < HEADS; h++) {
        Floats scores = sums_of(products[h]);
        if constexpr (TAIL<T> > 0) scores *= key_scales;
        memcpy(weights[h], &scores, sizeof scores);
        std::fill(weights[h] + n, weights[h] + CHUNK, -INFINITY);
        float &highest = heads.highest[first + h], &total = heads.total[first + h];
        float best = largest(load<Floats>(weights[h]));
        if (!(best <= highest)) {
            float shrink = exp_of_negative(highest - best);
            total *= shrink, highest = best;
            for (long i = 0; i < (size + WIDTH<T> - 1) / WIDTH<T> * WIDTH<T>; i++) heads.weighted[first + h][i] *= shrink;
        }
        for (int j = 0; j < CHUNK; j++) weights[h][j] = exp_of_negative(weights[h][j] - highest);
        Floats shares = load<Floats>(weights[h]);
        total += sum(shares);
        if constexpr (TAIL<T> > 0) shares *= value_scales, memcpy(weights[h], &shares, sizeof shares);
    }
    for (long i = 0; i < size; i += WIDTH<T>) {
        Floats weighted[HEADS][PARTS<T>];
        for (int h = 0; h < HEADS; h++) memcpy(weighted[h], heads.weighted[first + h] + i, sizeof weighted[h]);
        for (long j = 0; j < n; j++) {
            Floats value[PARTS<T>];
            spread_row<WHOLE>(values + j * width, i, size, value);
            for (int h = 0; h < HEADS; h++)
                for (int p = 0; p < PARTS<T>; p++) weighted[h][p] += value[p] * broadcast(weights[h][j]);
        }
        for (int h = 0; h < HEADS; h++) memcpy(heads.weighted[first + h] + i, weighted[h], sizeof weighted[h]);
    }
}

template <bool WHOLE, int FIXED, class T>
void attend_chunk_of(int num_heads, Heads &heads, int first, const T *keys, const T *values, long n, long size) {
    switch (num_heads) {
        case 1: return attend_chunk<1, WHOLE, FIXED>(heads, first, keys, values, n, size);
        case 2: return attend_chunk<2, WHOLE, FIXED>(heads, first, keys, values, n, size);
        case 3: return attend_chunk<3, WHOLE, FIXED>(heads, first, keys, values, n, size);
        default: return attend_chunk<MAX_HEADS, WHOLE, FIXED>(heads, first, keys, values, n, size);
    }
}

// Attention over keys [first, last) of one sequence and one K/V head -> part [group, head_dim + 2]: weighted, highest,
// total.
template <class T, class R>
void attend_part(const Attention &a, const T *q, const R *kv_layer, long seq, long head, long first, long last,
                 float *part) {
    Heads heads;
    long width = a.head_dim + TAIL<R>, head_size = a.block_size * width;  // of a row; of a head's K or V in a block
    for (long g = 0; g < a.group; g++) {
        const T *from = q + ((a.rows[seq] * a.num_kv_heads + head) * a.group + g) * a.head_dim;
        alignas(64) float wide_query[MAX_HEAD_DIM] = {};
        if constexpr (PARTS<R> == 1) widen(from, a.head_dim, wide_query);
        for (long i = 0; i < a.head_dim; i += WIDTH<R>) {
            Floats lanes[PARTS<R>];
            if constexpr (PARTS<R> == 1) spread(wide_query + i, lanes);
            else spread_row<false>(from, i, a.head_dim, lanes);
            for (int p = 0; p < PARTS<R>; p++) lanes[p] *= broadcast(a.scale);
            memcpy(heads.query[g] + i, lanes, sizeof lanes);
        }
        memset(heads.weighted[g], 0, sizeof heads.weighted[g]);
        heads.highest[g] = -INFINITY, heads.total[g] = 0;
    }
    auto attend = a.head_dim % STEP<R> ? attend_chunk_of<false, 0, R>
                  : a.head_dim == 64   ? attend_chunk_of<true, 64, R>
                                       : attend_chunk_of<true, 0, R>;
    auto keys_at = [&](long key) {
        long block = a.tables[seq * a.table_width + key / a.block_size];
        return kv_layer + block * a.block_stride + head * head_size + key % a.block_size * width;
    };
    for (long begin = first, end; begin < last; begin = end) {
        end = std::min({last, (begin / a.block_size + 1) * a.block_size, begin + CHUNK});
        const R *keys = keys_at(begin), *values = keys + a.num_kv_heads * head_size;
        if (end < last) {
            auto *next = reinterpret_cast<const char *>(keys_at(end));
            for (long i = 0; i < CHUNK * width * long(sizeof(R)); i += 64) {
                __builtin_prefetch(next + i, 0, 2);
                __builtin_prefetch(next + a.num_kv_heads * head_size * sizeof(R) + i, 0, 2);
            }
        }
        for (int g = 0; g < a.group; g += MAX_HEADS)
            attend(std::min<int>(MAX_HEADS, a.group - g), heads, g, keys, values, end - begin, a.head_dim);
    }
    for (long g = 0; g < a.group; g++, part += a.head_dim + 2) {
        for (long i = 0; i < a.head_dim; i++) {  // undo the order of `spread`
            long within = i % WIDTH<R>;
            part[i] = heads.weighted[g][i - within + within % PARTS<R> * LANES + within / PARTS<R>];
        }
        part[a.head_dim] = heads.highest[g], part[a.head_dim + 1] = heads.total[g];
    }
}

// reference.merge_attention of the parts of a query head, `stride` floats apart. Each part has at least one key. The
// sink is a score without a value; -INFINITY is none.
template <class T>
void merge_parts(const float *parts, long num_parts, long stride, long head_dim, float sink, T *out, float *lse) {
    float highest = sink;
    for (long p = 0; p < num_parts; p++) highest = std::max(highest, parts[p * stride + head_dim]);
    float total = exp_of_negative(sink - highest);
    alignas(64) float weighted[MAX_HEAD_DIM] = {};
    for (long p = 0; p < num_parts; p++) {
        const float *part = parts + p * stride;
        float share = exp_of_negative(part[head_dim] - highest);
        total += share * part[head_dim + 1];
        for (long i = 0; i < head_dim; i++) weighted[i] += share * part[i];
    }
    for (long i = 0; i < head_dim; i++) out[i] = narrow<T>(weighted[i] / total);
    if (lse) *lse = highest + std::log(total);
}

template <class T, class R> void decode_attention(const Attention &a) {
    auto *q = static_cast<const T *>(a.q);
    auto *kv_layer = static_cast<const R *>(a.kv_layer);
    auto *out = static_cast<T *>(a.out);
    struct Task {
        long seq, head, first, last;
    };
    std::vector<Task> tasks;
    std::vector<long> firsts;  // [num_seqs * num_kv_heads + 1], the first task of each pair
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
    parallel_for(long(tasks.size()), worth ? a.num_threads : 1, [&](long i) {
        attend_part(a, q, kv_layer, tasks[i].seq, tasks[i].head, tasks[i].first, tasks[i].last, parts + i * part_size);
    });
    for (long pair = 0; pair + 1 < long(firsts.size()); pair++) {
        if (firsts[pair] == firsts[pair + 1]) continue;  // padding: no keys
        long seq = pair / a.num_kv_heads, head = pair % a.num_kv_heads;
        for (long g = 0; g < a.group; g++) {
            long place = (a.rows[seq] * a.num_kv_heads + head) * a.group + g;
            float sink = a.sinks ? a.sinks[head * a.group + g] : -INFINITY;
            merge_parts(parts + firsts[pair] * part_size + g * head_size, firsts[pair + 1] - firsts[pair], part_size,
                        a.head_dim, sink, out + place * a.head_dim, a.lse ? a.lse + place : nullptr);
        }
    }
}

#include "chunks.h"
#include "recurrent.h"
#include "step.h"

}  // namespace

// -- functions for native.py ------------------------------------------------------------------------------------------

// Each function has one argument, a pointer to a struct, so that calls can be recorded and replayed.

#define EXPORT extern "C" __attribute__((visibility("default"))) void

EXPORT linear_bf16_32(const Linear *a) { linear<Bfloat16Words, 32>(*a); }
EXPORT linear_bf16_64(const Linear *a) { linear<Bfloat16Words, 64>(*a); }
EXPORT embed_bf16_32(const Embed *a) { embed<32>(*a); }
EXPORT embed_bf16_64(const Embed *a) { embed<64>(*a); }
EXPORT embed_plain(const Embed *a) { embed<1>(*a); }  // a plain table has tiles of one row
EXPORT gather_columns(const GatherColumns *a) {
    for (long row = 0; row < a->num_rows; row++)
        for (long i = 0; i < a->size; i++) a->out[row * a->size + i] = a->x[row * a->size + a->order[i]];
}

#define EXPORT_KIND(BITS, NAME, SCALES)                                                                             \
    EXPORT grouped_linear_##BITS##_##NAME(const Grouped *a) { grouped_linear<Kind<BITS, SCALES>>(*a); }             \
    EXPORT pack_groups_##BITS##_##NAME(const PackGroups *a) { pack_groups<Kind<BITS, SCALES>>(*a); }                \
    EXPORT embed_groups_##BITS##_##NAME(const EmbedGroups *a) { embed_groups<Kind<BITS, SCALES>>(*a); }             \
    EXPORT experts_in_##BITS##_##NAME(const Experts *a) { experts_in<bfloat16>(*a, grouped_products<Kind<BITS, SCALES>>); } \
    EXPORT experts_out_##BITS##_##NAME(const Experts *a) { experts_out<bfloat16>(*a, grouped_products<Kind<BITS, SCALES>>); }

FOR_EACH_KIND(EXPORT_KIND)

#define EXPORT_FOR(T, NAME)                                                         \
    EXPORT add_rms_norm_##NAME(const Norm *a) {                                     \
        a->float32_weight ? add_rms_norm<T, float>(*a) : add_rms_norm<T, T>(*a);    \
    }                                                                               \
    EXPORT silu_mul_##NAME(const Gate *a) { silu_mul<T>(*a); }                      \
    EXPORT gelu_mul_##NAME(const Gate *a) { gelu_mul<T>(*a); }                      \
    EXPORT add_##NAME(const Elementwise *e) {                                       \
        elementwise<T>(*e, [](float a, const T *b) { return a + wide(*b); });       \
    }                                                                               \
    EXPORT mul_##NAME(const Elementwise *e) {                                       \
        elementwise<T>(*e, [=](float a, const T *) { return a * e->factor; });      \
    }                                                                               \
    EXPORT div_##NAME(const Elementwise *e) {                                       \
        elementwise<T>(*e, [=](float a, const T *) { return a / e->factor; });      \
    }                                                                               \
    EXPORT copy_##NAME(const Elementwise *e) {                                      \
        elementwise<T>(*e, [](float a, const T *) { return a; });                   \
    }                                                                               \
    EXPORT causal_conv_##NAME(const CausalConv *a) { causal_conv<T>(*a); }          \
    EXPORT delta_rule_##NAME(const DeltaRule *a) { delta_rule<T>(*a); }             \
    EXPORT delta_gates_##NAME(const DeltaGates *a) { delta_gates<T>(*a); }          \
    EXPORT gated_rms_norm_##NAME(const GatedNorm *a) { gated_rms_norm<T>(*a); }     \
    EXPORT sigmoid_mul_##NAME(const SigmoidGate *a) { sigmoid_mul<T>(*a); }         \
    EXPORT experts_in_##NAME(const Experts *a) { experts_in<T>(*a, plain_products<T>); } \
    EXPORT experts_out_##NAME(const Experts *a) { experts_out<T>(*a, plain_products<T>); } \
    EXPORT rope_kv_write_##NAME(const RopeWrite *a) {                               \
        auto write = a->float32_norm ? a->int8_kv ? rope_kv_write<T, float, int8_t> : rope_kv_write<T, float, T>    \
                     : a->int8_kv ? rope_kv_write<T, T, int8_t> : rope_kv_write<T, T, T>;    \
        write(*a); \
    }                                                                               \
    EXPORT decode_attention_##NAME(const Attention *a) { \
        a->int8_kv ? decode_attention<T, int8_t>(*a) : decode_attention<T, T>(*a); \
    } \
    EXPORT sample_##NAME(const Sample *a) { sample<T>(*a); }

EXPORT add_bf16_f32(const Elementwise *e) {
    elementwise<float, bfloat16>(*e, [](float a, const bfloat16 *b) { return a + wide(*b); });
}

EXPORT chunk_attention_bf16(const Attention *a) {
    a->int8_kv ? chunk_attention<int8_t>(*a) : chunk_attention<bfloat16>(*a);
}
EXPORT route_tokens(const Route *a) { route(*a); }
EXPORT prepare_decode(const PrepareDecode *a) { prepare_decode(*a); }
EXPORT commit_tokens(const CommitTokens *a) { commit_tokens(*a); }

EXPORT_FOR(float, f32)
EXPORT_FOR(bfloat16, bf16)

struct Call {
    void (*function)(const void *);
    const void *arguments;
};

// Instructions for products of bfloat16 and of int8, and the width of registers.
extern "C" __attribute__((visibility("default"))) const char *const instructions[] = {
    BFLOAT16_INSTRUCTIONS, HAS_MATRIX_UNIT ? "tdpbsud and " INT8_INSTRUCTIONS : INT8_INSTRUCTIONS,
    WORDS == 16 ? "512 bits" : WORDS == 8 ? "256 bits" : "128 bits"};

EXPORT replay(const Call *calls, long num_calls) {
    for (long i = 0; i < num_calls; i++) calls[i].function(calls[i].arguments);
}
