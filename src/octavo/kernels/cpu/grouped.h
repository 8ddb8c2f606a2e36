// Products of weights kept in 4, 5, 6 or 8 bits, in groups that share a scale: `kernels/groups.py` has their arithmetic.
//
// Part of native.cpp. A tile is 16 outputs and all inputs, one stream of blocks. A block is some inputs, in whole cache
// lines: a header of scales, then a group of 32 inputs after the other. Outputs are padded to tiles and inputs to blocks,
// with scales of 0.
//
//     words     a vector has 4 inputs of each of 16 outputs; a group has 8 such words
//     4 bits    4 vectors: vector j has word 2j in its low nibbles, word 2j + 1 in its high ones
//     5 bits    then a vector of the fifth bits: bit w is of word w
//     6 bits    then two vectors of the fifth and sixth bits, of 4 words each
//     8 bits    8 vectors
//
// x is rounded to int8 in groups of 32. Sums are integers within a group and float32 across groups, in the order of the
// inputs. So the bits of a row's result do not depend on the other rows.

constexpr long TILE_OUT = 16, X_GROUP = 32;

// Rows of x in a register of Intel's matrix unit (AMX), and from how many rows on it is used. Counted, not timed: a run of
// rows takes about 40 cycles for a group and a tile, by its loads and its 4 operations a row on floats. `vpdpbusd` takes 7
// a row, for 8 products, the same operations and a fifth of unpacking. So 12 rows take half as long in the unit.
constexpr long MATRIX_ROWS = 16, WORTH_THE_UNIT = 12;
#if defined(__AMX_INT8__) && defined(__AVX512BW__)
#define MATRIX_UNIT
constexpr long PADDING = MATRIX_ROWS - 1;  // rows that a run may lack
// Linux lets a process use the unit once it has asked.
const bool HAS_MATRIX_UNIT = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */);
#else
constexpr long PADDING = 0;
constexpr bool HAS_MATRIX_UNIT = false;
#endif

// plain       a float16 scale for 32 inputs; `zero` is a number of the whole weight
// minima      the same, with float16 minima
// zeros       the same, with uint8 zeros
// wide_zeros  a float16 scale and a uint8 zero for 128 inputs
// nested      uint8 scales and minima for 32 inputs, a float16 scale and minimum of these for 256
// nested_16   int8 scales for 16 inputs, a float16 scale of these for 256
// e2m1        exponents of scales for 32 inputs, whose values are codes of e2m1: twice a value is a whole number
enum Scales { PLAIN, MINIMA, ZEROS, WIDE_ZEROS, NESTED, NESTED_16, E2M1 };

template <int NUM_BITS, Scales SCALES> struct Kind {
    static constexpr int BITS = NUM_BITS;
    static constexpr bool NESTS = SCALES == NESTED || SCALES == NESTED_16, HAS_MINIMA = SCALES == MINIMA || SCALES == NESTED;
    static constexpr bool HAS_ZEROS = SCALES == ZEROS || SCALES == WIDE_ZEROS, IS_SIGNED = SCALES == NESTED_16;
    static constexpr bool IS_E2M1 = SCALES == E2M1;
    static constexpr long SPAN = SCALES == NESTED_16 ? 16 : SCALES == WIDE_ZEROS ? 128 : 32;  // inputs that share a scale
    static constexpr long PARTS = SPAN == 16 ? 2 : 1;                                         // sums of a group of x
    static constexpr long INPUTS = NESTS ? 256 : HAS_ZEROS || IS_E2M1 ? 128 : 64, NUM_SCALES = INPUTS / SPAN;
    static constexpr long SCALE_SIZE = NESTS || IS_E2M1 ? 1 : 2;
    static constexpr long SCALES_AT = NESTS ? 64 : 0, SECOND_AT = SCALES_AT + NUM_SCALES * TILE_OUT * SCALE_SIZE;
    static constexpr long SECOND_SIZE = HAS_MINIMA ? SCALE_SIZE : HAS_ZEROS;  // of a minimum or a zero
    static constexpr long HEADER = (SECOND_AT + NUM_SCALES * TILE_OUT * SECOND_SIZE + 63) / 64 * 64;
    static constexpr long GROUP_BYTES = X_GROUP * TILE_OUT * BITS / 8, BYTES = HEADER + INPUTS / X_GROUP * GROUP_BYTES;

    static constexpr long scale_index(long group, long part) { return (group * X_GROUP + part * 16) / SPAN; }
};

// -- vectors ----------------------------------------------------------------------------------------------------------

typedef uint16_t Halves __attribute__((vector_size(2 * WORDS)));
typedef uint8_t Bytes __attribute__((vector_size(WORDS)));
typedef int8_t SignedBytes __attribute__((vector_size(WORDS)));

// Compilers convert vectors of different sizes a number at a time.
#if defined(__AVX512BW__)
inline FloatWords half_to_float(Halves h) { return (FloatWords)_mm512_cvtph_ps((__m256i)h); }
inline IntWords widen(Bytes b) { return (IntWords)_mm512_cvtepu8_epi32((__m128i)b); }
inline IntWords widen(SignedBytes b) { return (IntWords)_mm512_cvtepi8_epi32((__m128i)b); }
#elif defined(__AVX2__) && defined(__F16C__)
inline FloatWords half_to_float(Halves h) { return (FloatWords)_mm256_cvtph_ps((__m128i)h); }
inline IntWords widen(Bytes b) { return (IntWords)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, (int64_t)b)); }
inline IntWords widen(SignedBytes b) { return (IntWords)_mm256_cvtepi8_epi32(_mm_set_epi64x(0, (int64_t)b)); }
#else
inline FloatWords half_to_float(Halves h) {  // finite numbers
    auto bits = __builtin_convertvector(h, UintWords);
    FloatWords magnitude = (FloatWords)((bits & 0x7fff) << 13) * 0x1p112f;
    return (FloatWords)((UintWords)magnitude | (bits & 0x8000) << 16);
}
template <class V> inline IntWords widen(V bytes) { return __builtin_convertvector(bytes, IntWords); }
#endif

inline FloatWords to_floats(IntWords v) { return __builtin_convertvector(v, FloatWords); }

// Adds the products of two words of unsigned BITS bits and of int8 x to a sum.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define INT8_INSTRUCTIONS "vpdpbusd"
template <int BITS> inline void add_products(IntWords &sum, const UintWords *words, IntWords x0, IntWords x1) {
#ifdef __AVX512VNNI__
    auto dot = [](IntWords sum, UintWords w, IntWords x) { return (IntWords)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); };
#else
    auto dot = [](IntWords sum, UintWords w, IntWords x) { return (IntWords)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x); };
#endif
    sum = dot(dot(sum, words[0], x0), words[1], x1);
}
#elif defined(__SSSE3__)
#define INT8_INSTRUCTIONS "pmaddubsw"
#if defined(__AVX512BW__)
#define X86_VECTOR __m512i
#define X86(NAME) _mm512_##NAME##_epi16
#elif defined(__AVX2__)
#define X86_VECTOR __m256i
#define X86(NAME) _mm256_##NAME##_epi16
#else
#define X86_VECTOR __m128i
#define X86(NAME) _mm_##NAME##_epi16
#endif
// Four products of 6 bits fit 16 bits. 8 bits are two numbers of 4.
template <int BITS> inline void add_products(IntWords &sum, const UintWords *words, IntWords x0, IntWords x1) {
    auto add = [&](UintWords a, UintWords b, int16_t factor) {
        ShortWords pairs = (ShortWords)X86(maddubs)((X86_VECTOR)a, (X86_VECTOR)x0) + (ShortWords)X86(maddubs)((X86_VECTOR)b, (X86_VECTOR)x1);
        sum += (IntWords)X86(madd)((X86_VECTOR)pairs, (X86_VECTOR)(ShortWords{} + factor));
    };
    if constexpr (BITS == 8) {
        add(words[0] & 0x0f0f0f0f, words[1] & 0x0f0f0f0f, 1);
        add(words[0] >> 4 & 0x0f0f0f0f, words[1] >> 4 & 0x0f0f0f0f, 16);
    } else
        add(words[0], words[1], 1);
}
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define INT8_INSTRUCTIONS "usdot"
template <int BITS> inline void add_products(IntWords &sum, const UintWords *words, IntWords x0, IntWords x1) {
    auto dot = [](IntWords sum, UintWords w, IntWords x) { return (IntWords)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, (int8x16_t)x); };
    sum = dot(dot(sum, words[0], x0), words[1], x1);
}
#else
#define INT8_INSTRUCTIONS "int16"
template <int BITS> inline void add_products(IntWords &sum, const UintWords *words, IntWords x0, IntWords x1) {
    auto add = [&](ShortWords a, ShortWords x) {  // a product of bytes fits 16 bits
        IntWords pairs = (IntWords)(a * x);
        sum += (pairs << 16 >> 16) + (pairs >> 16);
    };
    for (IntWords x : {x0, x1}) {
        UintWords w = *words++;
        add((ShortWords)(w & 0x00ff00ff), (ShortWords)x << 8 >> 8);
        add((ShortWords)(w >> 8 & 0x00ff00ff), (ShortWords)x >> 8);
    }
}
#endif

// Keeps the compiler from reordering sums: all of them grow in turn, so none waits for itself.
#ifdef __AVX512F__
#define IN_TURN(sum) asm volatile("" : "+v"(sum))
#else
#define IN_TURN(sum)
#endif

// Twice the value of each code of e2m1, and 12 more, so that no number is negative.
alignas(64) constexpr uint8_t E2M1_VALUES[64] = {
#define E2M1_CODES 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
    E2M1_CODES, E2M1_CODES, E2M1_CODES, E2M1_CODES};
constexpr int E2M1_ZERO = 12;

inline UintWords e2m1_values(UintWords codes) {
#if defined(__AVX512BW__)
    return (UintWords)_mm512_shuffle_epi8(load<__m512i>(E2M1_VALUES), (__m512i)codes);
#elif defined(__AVX2__)
    return (UintWords)_mm256_shuffle_epi8(load<__m256i>(E2M1_VALUES), (__m256i)codes);
#elif defined(__SSSE3__)
    return (UintWords)_mm_shuffle_epi8(load<__m128i>(E2M1_VALUES), (__m128i)codes);
#elif defined(__aarch64__)
    return (UintWords)vqtbl1q_u8(vld1q_u8(E2M1_VALUES), (uint8x16_t)codes);
#else
    uint8_t bytes[sizeof codes];
    memcpy(bytes, &codes, sizeof codes);
    for (uint8_t &byte : bytes) byte = E2M1_VALUES[byte];
    return load<UintWords>(bytes);
#endif
}

// Words 2j and 2j + 1 of a group, of WORDS outputs.
template <class K> inline void load_words(const uint8_t *group, int j, UintWords *words) {
    constexpr int BITS = K::BITS;
    words[0] = load<UintWords>(group + (BITS == 8 ? 128 : 64) * j);
    if constexpr (BITS == 8)
        words[1] = load<UintWords>(group + 128 * j + 64);
    else
        words[1] = words[0] >> 4 & 0x0f0f0f0f, words[0] &= 0x0f0f0f0f;
    if constexpr (K::IS_E2M1) words[0] = e2m1_values(words[0]), words[1] = e2m1_values(words[1]);
    if constexpr (BITS == 5 || BITS == 6) {
        constexpr int HIGH = BITS - 4, A_PLANE = 8 / HIGH;  // words
        constexpr uint32_t MASK = 0x10101010u * ((1 << HIGH) - 1);
        for (int s = 0; s < 2; s++) {
            int word = 2 * j + s, bit = word % A_PLANE * HIGH;
            auto plane = load<UintWords>(group + 256 + 64 * (word / A_PLANE));
            words[s] |= (bit < 4 ? plane << (4 - bit) : plane >> (bit - 4)) & MASK;
        }
    }
}

// Scales of WORDS outputs, and their minima or zeros.
template <class K> inline void load_scales(const uint8_t *block, long lane, long index, FloatWords &scale, FloatWords &second) {
    const uint8_t *first = block + K::SCALES_AT + (index * TILE_OUT + lane) * K::SCALE_SIZE;
    const uint8_t *other = block + K::SECOND_AT + (index * TILE_OUT + lane) * K::SECOND_SIZE;
    if constexpr (K::NESTS) {
        scale = to_floats(K::IS_SIGNED ? widen(load<SignedBytes>(first)) : widen(load<Bytes>(first)));
        scale *= half_to_float(load<Halves>(block + 2 * lane));
        if (K::HAS_MINIMA) second = to_floats(widen(load<Bytes>(other))) * half_to_float(load<Halves>(block + 32 + 2 * lane));
    } else if constexpr (K::IS_E2M1) {
        IntWords exponents = widen(load<Bytes>(first));
        scale = (FloatWords)(exponents << 23 | ((exponents == 0) & 0x00400000));  // 2 ** -127 is subnormal
    } else {
        scale = half_to_float(load<Halves>(first));
        if constexpr (K::HAS_MINIMA) second = half_to_float(load<Halves>(other));
        if constexpr (K::HAS_ZEROS) second = to_floats(widen(load<Bytes>(other)));
    }
}

// -- products ---------------------------------------------------------------------------------------------------------

// A group of R rows of x.
template <int R> struct XGroup {
    int32_t words[R][8];  // int8
    float scale[R];
    int32_t start[2][R];  // -zero * the sum of 32 inputs, or of 16 and 16
    float sum[R];         // of the 32 inputs: with the scale for minima, without it for zeros
};
constexpr long X_GROUP_BYTES = sizeof(XGroup<1>);

// Add the products of a group or a part of it, with their scale, to sums of row r.
template <class K, int R>
inline void add_scaled(FloatWords &total, IntWords sum, const XGroup<R> &x, int r, FloatWords scale, FloatWords second) {
    FloatWords value = to_floats(sum);
    if constexpr (K::HAS_ZEROS) value -= second * x.sum[r];  // exact
    total += value * (scale * x.scale[r]);
    if constexpr (K::HAS_MINIMA) total -= second * x.sum[r];
}

// Add `count` blocks of T tiles, WORDS outputs each, times R rows to sums [R, T, 16]. With each block, prefetches `lines`
// cache lines of each tile from `ahead` on.
template <class K, int R, int T>
__attribute__((noinline)) void multiply_blocks(const uint8_t *tile, long tile_stride, long lane, const XGroup<R> *x, long count,
                                               float *sums, const uint8_t *ahead, long lines) {
    FloatWords total[R][T];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) total[r][t] = load<FloatWords>(sums + (r * T + t) * TILE_OUT);
    constexpr long GROUPS = K::INPUTS / X_GROUP;
    for (long block = 0; block < count; block++, tile += K::BYTES, ahead += 64 * lines) {
#pragma GCC unroll 2
        for (long group = 0; group < GROUPS; group++, x++) {
            for (long i = lines * group / GROUPS; i < lines * (group + 1) / GROUPS; i++)  // bursts would stall
                for (int t = 0; t < T; t++) __builtin_prefetch(ahead + t * tile_stride + 64 * i);
#pragma GCC unroll 2
            for (int part = 0; part < K::PARTS; part++) {
                IntWords sum[R][T];
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int t = 0; t < T; t++) sum[r][t] = IntWords{} + (K::HAS_MINIMA || K::HAS_ZEROS ? 0 : x->start[part][r]);
#pragma GCC unroll 4
                for (int j = part * 4 / K::PARTS; j < (part + 1) * 4 / K::PARTS; j++) {
                    UintWords words[T][2];
#pragma GCC unroll 2
                    for (int t = 0; t < T; t++)
                        load_words<K>(tile + t * tile_stride + K::HEADER + group * K::GROUP_BYTES + lane * 4, j, words[t]);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        IntWords x0 = IntWords{} + x->words[r][2 * j], x1 = IntWords{} + x->words[r][2 * j + 1];
#pragma GCC unroll 2
                        for (int t = 0; t < T; t++) {
                            add_products<K::BITS>(sum[r][t], words[t], x0, x1);
                            IN_TURN(sum[r][t]);
                        }
                    }
                }
                FloatWords scale[T], second[T];
#pragma GCC unroll 2
                for (int t = 0; t < T; t++) load_scales<K>(tile + t * tile_stride, lane, K::scale_index(group, part), scale[t], second[t]);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int t = 0; t < T; t++) add_scaled<K>(total[r][t], sum[r][t], *x, r, scale[t], second[t]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) memcpy(sums + (r * T + t) * TILE_OUT, &total[r][t], sizeof total[r][t]);
}

// `multiply_blocks` for `rows` rows, from LEAST to R.
template <class K, int R, int T, int LEAST, class... Rest>
void multiply_rows(long rows, const uint8_t *tile, long tile_stride, long lane, const void *x, Rest... rest) {
    if constexpr (R > LEAST)
        if (rows < R) return multiply_rows<K, R - 1, T, LEAST>(rows, tile, tile_stride, lane, x, rest...);
    multiply_blocks<K, R, T>(tile, tile_stride, lane, static_cast<const XGroup<R> *>(x), rest...);
}

struct Grouped {
    const uint8_t *blocks;
    const bfloat16 *x;  // [num_rows, num_in]
    const bfloat16 *bias;
    void *y;  // [num_rows, num_out] with y_stride numbers from row to row, float32 or bfloat16
    long num_rows, num_in, num_out, y_stride;
    int zero, float32_out, num_threads;
};

inline int sum_of_16(const int8_t *from) {
    constexpr uint64_t EVERY_OTHER = 0x00ff00ff00ff00ff;
    uint64_t words[2], sums = 0;
    memcpy(words, from, sizeof words);
    for (uint64_t word : words) word ^= 0x8080808080808080, sums += (word & EVERY_OTHER) + (word >> 8 & EVERY_OTHER);
    return int(sums * 0x0001000100010001 >> 48) - 16 * 128;
}

// Round row r of a block of R rows of x to int8. x is padded with zeros to `num_groups`.
template <class K, int R> void round_row(const bfloat16 *x, long num_in, long num_groups, int zero, int r, XGroup<R> *out) {
    for (long g = 0; g < num_groups; g++, out++) {
        bfloat16 padded[X_GROUP] = {};
        const bfloat16 *from = x + g * X_GROUP;
        if ((g + 1) * X_GROUP > num_in) {
            if (g * X_GROUP < num_in) memcpy(padded, from, (num_in - g * X_GROUP) * sizeof *x);
            from = padded;
        }
        uint16_t bits = 0;  // unsigned bits have the order of magnitudes; NaN is the largest, and its group gets a NaN scale
        for (long i = 0; i < X_GROUP; i++) bits = std::max(bits, uint16_t(from[i].bits & 0x7fff));
        float max_abs = wide(bfloat16{bits}), inverse = max_abs > 0 ? 127 / max_abs : 0;
        int8_t rounded[X_GROUP];
        for (long i = 0; i < X_GROUP; i++) rounded[i] = int8_t(std::nearbyint(wide(from[i]) * inverse));
        int first = sum_of_16(rounded), second = sum_of_16(rounded + 16);
        memcpy(out->words[r], rounded, sizeof rounded);
        out->scale[r] = max_abs / (K::IS_E2M1 ? 254 : 127);
        out->start[0][r] = -zero * (K::PARTS == 2 ? first : first + second), out->start[1][r] = -zero * second;
        out->sum[r] = (K::HAS_MINIMA ? out->scale[r] : 1.0f) * (first + second);
    }
}

// Round a run of LEAST to R rows to int8. If it has fewer, the last rows of a block of LEAST stay as they are.
template <class K, int R, int LEAST>
void round_rows(long num_rows, const bfloat16 *const *rows, long num_in, long num_groups, int zero, void *out) {
    if constexpr (R > LEAST)
        if (num_rows < R) return round_rows<K, R - 1, LEAST>(num_rows, rows, num_in, num_groups, zero, out);
    for (int r = 0; r < num_rows; r++) round_row<K, R>(rows[r], num_in, num_groups, zero, r, static_cast<XGroup<R> *>(out));
}

// Memory of x in int8, which a core's second-level cache keeps; of the weights of a step, which all rows use while its
// first-level cache keeps them; and how far ahead of its use a single block of rows has memory read.
constexpr long X_BYTES = 384 << 10, GROUPED_STEP_BYTES = 8 << 10, AHEAD_BYTES = 4 << 10;

template <class K> struct GroupedSizes {
    long num_blocks, num_groups, num_tiles, tile_bytes, num_out, row_bytes;  // row_bytes: of x

    GroupedSizes(long num_in, long num_out)
        : num_blocks((num_in + K::INPUTS - 1) / K::INPUTS), num_groups(num_blocks * (K::INPUTS / X_GROUP)),
          num_tiles((num_out + TILE_OUT - 1) / TILE_OUT), tile_bytes(num_blocks * K::BYTES), num_out(num_out),
          row_bytes(num_groups * X_GROUP_BYTES) {}
};

// Runs of LEAST to MOST rows with TILES tiles at a time. For the matrix unit, memory has whole runs.
template <int LEAST_ROWS, int MOST_ROWS, int NUM_TILES> struct TileShape {
    static constexpr int LEAST = LEAST_ROWS, MOST = MOST_ROWS, TILES = NUM_TILES;
    static constexpr bool IS_MATRIX = LEAST == MATRIX_ROWS;
};

// Rows in runs of which no two differ by more than a row, or in whole ones but for the last.
template <class Shape> struct Runs {
    long num_rows, num, less, more;

    explicit Runs(long num_rows)
        : num_rows(num_rows), num((num_rows + Shape::MOST - 1) / Shape::MOST),
          less(Shape::IS_MATRIX ? Shape::MOST : num_rows / num), more(Shape::IS_MATRIX ? 0 : num_rows % num) {}
    long row(long run) const { return std::min(num_rows, run * less + std::min(run, more)); }
    long size(long run) const { return row(run + 1) - row(run); }
};

// Memory for rows of x in int8, which are cut into runs `num` times.
template <class K> char *memory_of_x(const GroupedSizes<K> &sizes, long num_rows, long num) {
    return reinterpret_cast<char *>(scratch<2>((num_rows + num * PADDING) * sizes.row_bytes / sizeof(float)));
}

// use(the shape for so many rows)
template <class K, class Use> void with_tiles(long num_rows, const Use &use) {
#ifdef MATRIX_UNIT
    if (HAS_MATRIX_UNIT && num_rows >= WORTH_THE_UNIT) return use(TileShape<MATRIX_ROWS, MATRIX_ROWS, 2>());
#endif
    if constexpr (WORDS == 16)
        if (num_rows > 4) return use(TileShape<3, 5, 2>());
    use(TileShape<1, 4, 1>());
}

template <class K> struct MatrixUnit;

#ifdef MATRIX_UNIT
// Products by the matrix unit, whose registers have up to 16 rows of 64 bytes: sums are in 0 and 1, runs of x in 2 and 3,
// weights in 4 and 5. The sums of a group are the integers of other instructions, and `add_scaled` is the same. So a row
// has the same bits. Rows that a run lacks are computed from what the memory has, and nobody reads them.
template <class K> struct MatrixUnit {
    typedef XGroup<MATRIX_ROWS> X;
    static constexpr long GROUPS = K::INPUTS / X_GROUP, PRODUCTS = GROUPS * K::PARTS, TILES = 2;
    static constexpr long INPUTS = X_GROUP / K::PARTS;  // of a product
    static constexpr long STEP = std::max(1L, GROUPED_STEP_BYTES / (TILES * K::BYTES)), WORDS_BYTES = K::INPUTS * TILE_OUT;

    struct alignas(64) Configuration {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, INPUTS, INPUTS, 64, 64};
        uint8_t rows[16] = {MATRIX_ROWS, MATRIX_ROWS, MATRIX_ROWS, MATRIX_ROWS, INPUTS / 4, INPUTS / 4};
    };

    // Sums of product `index` of a block and of the next one: one is loaded while the other is computed.
    static void multiply_two(const X *x, const uint8_t *words, long index, int32_t (*sums)[MATRIX_ROWS][TILE_OUT]) {
        auto x_of = [&](long i) { return x[i / K::PARTS].words[0] + i % K::PARTS * (INPUTS / 4); };
        asm volatile("" ::: "memory");  // GCC's loads do not say that they read memory
        _tile_zero(0);
        _tile_loadd(2, x_of(index), X_GROUP);
        _tile_loadd(4, words + index * INPUTS * TILE_OUT, 64);
        _tile_dpbsud(0, 2, 4);
        _tile_zero(1);
        _tile_loadd(3, x_of(index + 1), X_GROUP);
        _tile_loadd(5, words + (index + 1) * INPUTS * TILE_OUT, 64);
        _tile_dpbsud(1, 3, 5);
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
    }

    // `multiply_blocks` for a tile, a run and sums [16, TILES, 16]. words: the weights as bytes.
    __attribute__((noinline)) static void multiply_blocks(const uint8_t *tile, const uint8_t *words, const X *x, long count,
                                                          float *sums, const uint8_t *ahead, long lines) {
        FloatWords total[MATRIX_ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < MATRIX_ROWS; r++) total[r] = load<FloatWords>(sums + r * TILES * TILE_OUT);
        for (long block = 0; block < count; block++, x += GROUPS, tile += K::BYTES, ahead += 64 * lines) {
            for (long index = 0; index < PRODUCTS; index += 2) {
                for (long i = lines * index / PRODUCTS; i < lines * (index + 2) / PRODUCTS; i++) __builtin_prefetch(ahead + 64 * i);
                alignas(64) int32_t products[2][MATRIX_ROWS][TILE_OUT];
                multiply_two(x, words, index, products);
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    long group = (index + i) / K::PARTS, part = (index + i) % K::PARTS;
                    FloatWords scale, second;
                    load_scales<K>(tile, 0, K::scale_index(group, part), scale, second);
#pragma GCC unroll 16
                    for (int r = 0; r < MATRIX_ROWS; r++) {
                        IntWords start = IntWords{} + (K::HAS_MINIMA || K::HAS_ZEROS ? 0 : x[group].start[part][r]);
                        add_scaled<K>(total[r], start + load<IntWords>(products[i][r]), x[group], r, scale, second);
                    }
                }
            }
            words += K::BITS == 8 ? K::BYTES : WORDS_BYTES;
        }
#pragma GCC unroll 16
        for (int r = 0; r < MATRIX_ROWS; r++) memcpy(sums + r * TILES * TILE_OUT, &total[r], sizeof total[r]);
    }

    static void unpack(const uint8_t *tile, long count, uint8_t *words) {
        for (long block = 0; block < count; block++, tile += K::BYTES)
            for (long group = 0; group < GROUPS; group++)
                for (int j = 0; j < 4; j++, words += 2 * sizeof(UintWords)) {
                    UintWords two[2];
                    load_words<K>(tile + K::HEADER + group * K::GROUP_BYTES, j, two);
                    memcpy(words, two, sizeof two);
                }
    }

    // See the function below. Weights of a step are unpacked once for all runs. A thread configures the unit for itself;
    // released, it costs nothing when threads take turns.
    template <class Shape>
    static const float *multiply_tile(const uint8_t *blocks, const GroupedSizes<K> &sizes, long first_tile, const char *x,
                                      const Runs<Shape> &runs, long begin, long end) {
        long tile_stride = first_tile + TILES <= sizes.num_tiles ? sizes.tile_bytes : 0;
        long num_sums = (end - begin) * MATRIX_ROWS * TILES * TILE_OUT, lines = (K::BYTES / 64 + end - begin - 1) / (end - begin);
        float *sums = scratch<3>(num_sums);
        std::fill_n(sums, num_sums, 0.0f);
        alignas(64) uint8_t unpacked[TILES][STEP * WORDS_BYTES];
        static constexpr Configuration configuration;
        _tile_loadconfig(&configuration);
        for (long block = 0; block < sizes.num_blocks; block += STEP) {
            long count = std::min(STEP, sizes.num_blocks - block);
            long next = count * K::BYTES + (block + count == sizes.num_blocks ? (TILES - 1) * tile_stride : 0);
            for (long run = begin; run < end; run++)
                for (long t = 0; t < TILES; t++) {
                    const uint8_t *tile = blocks + first_tile * sizes.tile_bytes + t * tile_stride + block * K::BYTES;
                    if (K::BITS != 8 && run == begin) unpack(tile, count, unpacked[t]);
                    const char *from = x + runs.row(run) * sizes.row_bytes + block * GROUPS * sizeof(X);
                    multiply_blocks(tile, K::BITS == 8 ? tile + K::HEADER : unpacked[t], reinterpret_cast<const X *>(from), count,
                                    sums + ((run - begin) * MATRIX_ROWS * TILES + t) * TILE_OUT,
                                    tile + next + (run - begin) * lines * count * 64, lines);
                }
        }
        _tile_release();
        return sums;
    }
};
#endif

// Sums [rows, Shape::TILES, 16] of tiles and the rows of runs [begin, end), in scratch memory. x: that of run 0.
template <class K, class Shape>
__attribute__((noinline)) const float *multiply_tile(const uint8_t *blocks, const GroupedSizes<K> &sizes, long first_tile,
                                                     const char *x, const Runs<Shape> &runs, long begin, long end) {
    if constexpr (Shape::IS_MATRIX) return MatrixUnit<K>::multiply_tile(blocks, sizes, first_tile, x, runs, begin, end);
    constexpr long PASSES = TILE_OUT / WORDS, T = Shape::TILES;
    long num_blocks = sizes.num_blocks, first_row = runs.row(begin), is_one = end - begin == 1;
    long step = is_one && T * PASSES == 1 ? num_blocks : std::max(1L, GROUPED_STEP_BYTES / (T * K::BYTES));
    long lines = (K::BYTES / 64 + end - begin - 1) / (end - begin);
    const uint8_t *tile = blocks + first_tile * sizes.tile_bytes;
    long tile_stride = first_tile + T <= sizes.num_tiles ? sizes.tile_bytes : 0;  // an odd tile is computed twice
    long num_sums = (runs.row(end) - first_row) * T * TILE_OUT;
    float *sums = scratch<3>(num_sums);
    std::fill_n(sums, num_sums, 0.0f);
    for (long block = 0; block < num_blocks; block += step) {
        long count = std::min(step, num_blocks - block);
        const uint8_t *now = tile + block * K::BYTES, *next = now + count * K::BYTES;
        if (block + count == num_blocks) next += (T - 1) * tile_stride;
        for (long run = begin; run < end; run++) {
            long row = runs.row(run), num_rows = runs.size(run), done = (run - begin) * lines;
            const uint8_t *ahead = is_one ? now + AHEAD_BYTES : next + done * count * 64;
            const char *from = x + row * sizes.row_bytes + block * (K::INPUTS / X_GROUP) * X_GROUP_BYTES * num_rows;
            for (long pass = 0; pass < PASSES; pass++)
                multiply_rows<K, Shape::MOST, T, Shape::LEAST>(num_rows, now, tile_stride, pass * WORDS, from, count,
                                                               sums + (row - first_row) * T * TILE_OUT + pass * WORDS, ahead,
                                                               pass || done * 64 >= K::BYTES ? 0 : lines);
        }
    }
    return sums;
}

// A row's sums of some tiles, with a bias, to y [num_out].
template <class Y> void write_sums(const float *sums, long first_tile, long num_tiles, const bfloat16 *bias, long num_out, Y *y) {
    for (long t = 0; t < num_tiles; t++, sums += TILE_OUT) {
        long out = (first_tile + t) * TILE_OUT, width = std::min(TILE_OUT, num_out - out);
        auto write = [&](long width) {
            for (long i = 0; i < width; i++) y[out + i] = narrow<Y>(bias ? sums[i] + wide(bias[out + i]) : sums[i]);
        };
        width == TILE_OUT ? write(TILE_OUT) : write(width);
    }
}

template <class K, class Shape> void grouped_product(const Grouped &a) {
    if (!a.num_rows) return;  // a chunk that needs no logits
    const GroupedSizes<K> sizes(a.num_in, a.num_out);
    Runs<Shape> runs(a.num_rows);
    char *x = memory_of_x(sizes, a.num_rows, 1);
    parallel_for(runs.num, a.num_rows * a.num_in > WORTH_A_THREAD ? a.num_threads : 1, [&](long run) {
        const bfloat16 *rows[Shape::MOST];
        for (long row = runs.row(run); row < runs.row(run + 1); row++) rows[row - runs.row(run)] = a.x + row * a.num_in;
        round_rows<K, Shape::MOST, Shape::LEAST>(runs.size(run), rows, a.num_in, sizes.num_groups, a.zero,
                                                 x + runs.row(run) * sizes.row_bytes);
    });
    long chunk = std::max(1L, X_BYTES / (sizes.row_bytes * Shape::MOST));
    for (long begin = 0; begin < runs.num; begin += chunk) {
        long end = std::min(runs.num, begin + chunk);
        parallel_for((sizes.num_tiles + Shape::TILES - 1) / Shape::TILES, a.num_threads, [&](long i) {
            const float *sums = multiply_tile<K, Shape>(a.blocks, sizes, i * Shape::TILES, x, runs, begin, end);
            for (long row = runs.row(begin); row < runs.row(end); row++, sums += Shape::TILES * TILE_OUT) {
                auto write = [&](auto *y) {
                    write_sums(sums, i * Shape::TILES, Shape::TILES, a.bias, a.num_out, y + row * a.y_stride);
                };
                a.float32_out ? write(static_cast<float *>(a.y)) : write(static_cast<bfloat16 *>(a.y));
            }
        });
    }
}

template <class K> void grouped_linear(const Grouped &a) {
    with_tiles<K>(a.num_rows, [&](auto shape) { grouped_product<K, decltype(shape)>(a); });
}

// -- packing, embeddings ----------------------------------------------------------------------------------------------

struct PackGroups {
    const uint8_t *values;  // [num_out, num_in]
    const void *scales, *seconds;           // [num_out, num_in / SPAN]; seconds are minima or zeros
    const uint16_t *supers, *super_minima;  // [num_out, num_in / 256]
    uint8_t *blocks;                        // zeros
    long num_out, num_in;
    int num_threads;
};

template <class K> void pack_groups(const PackGroups &a) {
    long num_tiles = (a.num_out + TILE_OUT - 1) / TILE_OUT, num_blocks = (a.num_in + K::INPUTS - 1) / K::INPUTS;
    long num_scales = a.num_in / K::SPAN;
    parallel_for(num_tiles, a.num_threads, [&](long tile) {
        for (long out = tile * TILE_OUT; out < std::min(a.num_out, (tile + 1) * TILE_OUT); out++) {
            uint8_t *block = a.blocks + tile * num_blocks * K::BYTES;
            long lane = out % TILE_OUT;
            auto copy = [&](const void *from, long index, long size, uint8_t *to) {
                memcpy(to + lane * size, static_cast<const uint8_t *>(from) + index * size, size);
            };
            for (long i = 0; i < num_scales; i++) {
                uint8_t *to = block + i / K::NUM_SCALES * K::BYTES;
                long at = i % K::NUM_SCALES * TILE_OUT;
                copy(a.scales, out * num_scales + i, K::SCALE_SIZE, to + K::SCALES_AT + at * K::SCALE_SIZE);
                if (K::SECOND_SIZE) copy(a.seconds, out * num_scales + i, K::SECOND_SIZE, to + K::SECOND_AT + at * K::SECOND_SIZE);
            }
            for (long i = 0; K::NESTS && i < num_blocks; i++) {
                copy(a.supers, out * num_blocks + i, 2, block + i * K::BYTES);
                if (K::HAS_MINIMA) copy(a.super_minima, out * num_blocks + i, 2, block + i * K::BYTES + 32);
            }
            for (long g = 0; g < a.num_in / X_GROUP; g++) {
                constexpr long GROUPS = K::INPUTS / X_GROUP;
                auto *to = reinterpret_cast<uint32_t *>(block + g / GROUPS * K::BYTES + K::HEADER + g % GROUPS * K::GROUP_BYTES) + lane;
                auto *words = reinterpret_cast<const uint32_t *>(a.values + out * a.num_in + g * X_GROUP);
                for (int w = 0; w < 8; w++) {
                    if (K::BITS == 8) {
                        to[w * TILE_OUT] = words[w];
                        continue;
                    }
                    to[w / 2 * TILE_OUT] |= (words[w] & 0x0f0f0f0f) << w % 2 * 4;
                    constexpr int HIGH = K::BITS - 4, A_PLANE = HIGH ? 8 / HIGH : 1;
                    if (HIGH) to[(4 + w / A_PLANE) * TILE_OUT] |= (words[w] >> 4 & 0x0f0f0f0f) << w % A_PLANE * HIGH;
                }
            }
        }
    });
}

struct EmbedGroups {
    const int64_t *token_ids;
    const uint8_t *blocks;
    bfloat16 *out;  // [num_tokens, size]
    long num_tokens, size;
    int zero;
};

// Computes WORDS outputs to keep one.
template <class K> void embed_groups(const EmbedGroups &a) {
    long num_blocks = (a.size + K::INPUTS - 1) / K::INPUTS;
    for (long t = 0; t < a.num_tokens; t++) {
        long token = a.token_ids[t], lane = token % TILE_OUT / WORDS * WORDS, at = token % WORDS;
        const uint8_t *tile = a.blocks + token / TILE_OUT * num_blocks * K::BYTES;
        for (long g = 0; g * X_GROUP < a.size; g++) {
            constexpr long GROUPS = K::INPUTS / X_GROUP;
            const uint8_t *block = tile + g / GROUPS * K::BYTES, *group = block + K::HEADER + g % GROUPS * K::GROUP_BYTES;
            for (long i = 0; i < std::min(X_GROUP, a.size - g * X_GROUP); i++) {
                FloatWords scale, second = {};
                UintWords words[2];
                load_scales<K>(block, lane, K::scale_index(g % GROUPS, K::PARTS == 2 ? i / 16 : 0), scale, second);
                load_words<K>(group + lane * 4, i / 8, words);
                float value = words[i / 4 % 2][at] >> i % 4 * 8 & 0xff;
                value -= K::HAS_ZEROS ? second[at] : a.zero;
                value = scale[at] * (K::IS_E2M1 ? value / 2 : value);
                a.out[t * a.size + g * X_GROUP + i] = narrow<bfloat16>(K::HAS_MINIMA ? value - second[at] : value);
            }
        }
    }
}

#define FOR_EACH_KIND(DO)                                                                                        \
    DO(4, plain, PLAIN) DO(4, minima, MINIMA) DO(4, zeros, ZEROS) DO(4, wide_zeros, WIDE_ZEROS)                  \
    DO(4, nested, NESTED) DO(5, plain, PLAIN) DO(5, minima, MINIMA) DO(5, nested, NESTED)                        \
    DO(6, nested_16, NESTED_16) DO(8, plain, PLAIN) DO(8, zeros, ZEROS) DO(4, e2m1, E2M1)
