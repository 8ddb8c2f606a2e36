// Mixtures of experts: `kernels/reference/experts.py` defines the operations.
//
// Part of native.cpp. Pairs of a token and one of its experts are sorted by expert. A unit of work is some outputs of an
// expert for all its pairs, so its weights come from memory once. The sums of a pair are added in the order of its inputs,
// whatever the other pairs are; those of a token in the order of its experts. So its bits do not depend on other tokens.

// -- router -----------------------------------------------------------------------------------------------------------

struct Route {
    const float *logits;  // [num_tokens, num_experts]
    int32_t *experts;     // [num_tokens, top_k]
    float *weights;
    long num_tokens, num_experts, top_k;
    int softmax_first, renormalise;
};

// An integer with the order of a float: -0 and 0 are equal, NaN is the largest.
inline int32_t order_key(float x) {
    float positive_zero = x + 0.0f;
    int32_t bits;
    memcpy(&bits, &positive_zero, sizeof bits);
    return x != x ? INT32_MAX : bits ^ (bits >> 31 & INT32_MAX);
}

inline void route_token(const Route &a, const float *logits, int32_t *experts, float *weights) {
    constexpr int32_t CHOSEN = INT32_MIN;  // below the key of any number
    auto *keys = reinterpret_cast<int32_t *>(scratch<0>(a.num_experts));
    for (long e = 0; e < a.num_experts; e++) keys[e] = order_key(logits[e]);
    float highest = 0;
    for (long k = 0; k < a.top_k; k++) {
        long best = std::max_element(keys, keys + a.num_experts) - keys;  // the first of equal ones
        if (!k) highest = logits[best];
        keys[best] = CHOSEN;
    }
    float total = 0, chosen_total = 0;
    for (long e = 0, k = 0; e < a.num_experts; e++) {
        if (keys[e] != CHOSEN && !a.softmax_first) continue;
        float weight = exp_of_negative(logits[e] - highest);
        total += weight;
        if (keys[e] != CHOSEN) continue;
        experts[k] = e, weights[k++] = weight;
        chosen_total += weight;
    }
    for (long k = 0; k < a.top_k; k++) weights[k] /= a.renormalise ? chosen_total : total;
}

inline void route(const Route &a) {
    for (long t = 0; t < a.num_tokens; t++)
        route_token(a, a.logits + t * a.num_experts, a.experts + t * a.top_k, a.weights + t * a.top_k);
}

// -- pairs ------------------------------------------------------------------------------------------------------------

struct Experts {
    const void *x;           // [num_tokens, num_in] for experts_in; [num_tokens, top_k, num_in] for experts_out
    const void *weight;      // [num_experts, num_out, num_in], or blocks of grouped.h with whole tiles for each expert
    const void *bias;        // [num_experts, num_out] or null
    const int32_t *experts;  // [num_tokens, top_k]
    const float *weights;
    void *out;  // [num_tokens, top_k, num_out / 2] for experts_in; [num_tokens, num_out] for experts_out
    long num_tokens, top_k, num_experts, num_in, num_out;
    float alpha, limit;
    int gate, zero, num_threads;

    long num_pairs() const { return num_tokens * top_k; }
};

// Pairs that are multiplied together: order[begin], ..., order[end - 1].
struct Segment {
    long expert, begin, end;
};

struct Pairs {
    std::vector<Segment> segments;
    std::vector<long> order;
    long pairs_a_row;  // of x: top_k for experts_in, 1 for experts_out

    Pairs(const Experts &a, long pairs_a_row) : order(a.num_pairs()), pairs_a_row(pairs_a_row) {
        std::vector<long> ends(a.num_experts);
        for (long p = 0; p < a.num_pairs(); p++) ends[a.experts[p]]++;
        for (long e = 0, begin = 0; e < a.num_experts; e++) {
            long end = begin + ends[e];
            if (end > begin) segments.push_back({e, begin, end});
            ends[e] = begin, begin = end;
        }
        for (long p = 0; p < a.num_pairs(); p++) order[ends[a.experts[p]]++] = p;
    }

    void split(long most) {  // segments of at most so many pairs
        std::vector<Segment> parts;
        for (auto [expert, begin, end] : segments)
            for (; begin < end; begin += most) parts.push_back({expert, begin, std::min(end, begin + most)});
        segments = parts;
    }

    long num_rows() const { return long(order.size()) / pairs_a_row; }
};

inline int threads_for(const Experts &a, const Pairs &pairs) {
    return long(pairs.segments.size()) * a.num_out * a.num_in > WORTH_A_THREAD ? a.num_threads : 1;
}

// -- products of plain weights ----------------------------------------------------------------------------------------

// A step of a dot product: some inputs of a row of weights and of a row of x, which are converted once and padded with
// zeros. ROWS rows of x are multiplied with 4 of weights at a time.
template <class T> struct Dot {
    typedef T Weight;
    typedef float X;  // in the order of `spread`
    static constexpr long STEP = WIDTH<T>;
    static constexpr int NUM_PARTS = PARTS<T>, ROWS = LANES == 16 ? 4 : 3;

    static Floats weights(const float *from, int) { return load<Floats>(from); }
    static Floats weights(const bfloat16 *from, int part) {
        auto pairs = load<Words>(from);
        return (Floats)(part ? pairs & 0xffff0000u : pairs << 16);
    }
    static Floats factor(const float *x, int part) { return load<Floats>(x + part * LANES); }
    static Floats add(Floats sum, Floats w, Floats x) { return sum + w * x; }
    static void convert(const T *from, float *to) {
        Floats parts[NUM_PARTS];
        spread(from, parts);
        memcpy(to, parts, sizeof parts);
    }
};

#ifdef __AVX512BF16__
template <> struct Dot<bfloat16> {
    typedef bfloat16 Weight, X;
    static constexpr long STEP = 32;
    static constexpr int NUM_PARTS = 1, ROWS = 4;

    static __m512bh weights(const bfloat16 *from, int) { return (__m512bh)load<IntWords>(from); }
    static __m512bh factor(const bfloat16 *x, int) { return (__m512bh)load<IntWords>(x); }
    static Floats add(Floats sum, __m512bh w, __m512bh x) { return (Floats)_mm512_dpbf16_ps((__m512)sum, x, w); }
    static void convert(const bfloat16 *from, bfloat16 *to) { memcpy(to, from, STEP * sizeof *to); }
};
#endif

template <class D, int M>
inline void add_step(Floats *total, const typename D::Weight *const *rows, long at, const typename D::X *const *x, long x_at) {
    for (int part = 0; part < D::NUM_PARTS; part++) {
        decltype(D::weights(rows[0], part)) w[4];
        for (int n = 0; n < 4; n++) w[n] = D::weights(rows[n] + at, part);
        for (int m = 0; m < M; m++) {
            auto factor = D::factor(x[m] + x_at, part);
            for (int n = 0; n < 4; n++) total[4 * m + n] = D::add(total[4 * m + n], w[n], factor);
        }
    }
}

// sums [M, 4] = x @ rows.T. READS: the weights come from memory, and those of the next four rows are prefetched.
template <class D, int M, bool READS>
__attribute__((noinline)) void dot_products(const typename D::Weight *const *rows, long num_in, const typename D::X *const *x, float *sums) {
    constexpr int NUM_SUMS = (4 * M + LANES - 1) / LANES * LANES;
    Floats total[NUM_SUMS] = {};
    long k = 0;
    for (; k + D::STEP <= num_in; k += D::STEP) {
        if constexpr (READS)
            for (int n = 0; n < 4; n++) __builtin_prefetch(rows[n] + 4 * num_in + k);
        add_step<D, M>(total, rows, k, x, k);
    }
    if (k < num_in) {
        typename D::Weight tail[4][D::STEP] = {};
        const typename D::Weight *tails[4];
        for (int n = 0; n < 4; n++) memcpy(tail[n], rows[n] + k, (num_in - k) * sizeof tail[n][0]), tails[n] = tail[n];
        add_step<D, M>(total, tails, 0, x, k);
    }
    for (int i = 0; i < NUM_SUMS; i += LANES) {
        Floats some = sums_of(total + i);
        memcpy(sums + i, &some, sizeof some);
    }
}

template <class D, bool READS, int M = D::ROWS, class... Rest> void dot_products_of(int rows, Rest... rest) {
    if constexpr (M > 1)
        if (rows < M) return dot_products_of<D, READS, M - 1>(rows, rest...);
    dot_products<D, M, READS>(rest...);
}

constexpr long UNIT_OUT = 64;

template <class D> struct PlainUnit {
    typedef typename D::Weight T;
    const T *weight, *bias;  // of the unit's outputs
    long num_in, width;

    // y [rows, width] = x @ weight.T + bias
    template <bool READS> void multiply(int rows, const typename D::X *const *x, float *const *y) const {
        float sums[(4 * D::ROWS + LANES - 1) / LANES * LANES];
        for (long n = 0; n < width; n += 4) {
            const T *four[4];
            for (long i = 0; i < 4; i++) four[i] = weight + std::min(n + i, width - 1) * num_in;
            dot_products_of<D, READS>(rows, static_cast<const T *const *>(four), num_in, x, static_cast<float *>(sums));
            for (int row = 0; row < rows; row++)
                for (long i = 0; i < std::min(4L, width - n); i++)
                    y[row][n + i] = bias ? sums[4 * row + i] + wide(bias[n + i]) : sums[4 * row + i];
        }
    }
};

// y [pairs, num_out] = x @ weight.T + bias
template <class T> void plain_products(const Experts &a, Pairs &pairs, float *y) {
    typedef Dot<T> D;
    typedef typename D::X X;
    long stride = (a.num_in + D::STEP - 1) / D::STEP * D::STEP, num_rows = pairs.num_rows();
    auto *x = reinterpret_cast<X *>(scratch<2>(num_rows * stride * sizeof(X) / sizeof(float)));
    parallel_for(num_rows, num_rows * a.num_in > WORTH_A_THREAD ? a.num_threads : 1, [&](long row) {
        const T *from = static_cast<const T *>(a.x) + row * a.num_in;
        long k = 0;
        for (; k + D::STEP <= a.num_in; k += D::STEP) D::convert(from + k, x + row * stride + k);
        if (k == a.num_in) return;
        T tail[D::STEP] = {};
        memcpy(tail, from + k, (a.num_in - k) * sizeof(T));
        D::convert(tail, x + row * stride + k);
    });
    long num_units = (a.num_out + UNIT_OUT - 1) / UNIT_OUT;
    auto *bias = static_cast<const T *>(a.bias);
    parallel_for(long(pairs.segments.size()) * num_units, threads_for(a, pairs), [&](long i) {
        auto [expert, begin, end] = pairs.segments[i / num_units];
        long first = i % num_units * UNIT_OUT, at = expert * a.num_out + first;
        PlainUnit<D> unit{static_cast<const T *>(a.weight) + at * a.num_in, bias ? bias + at : nullptr, a.num_in,
                          std::min(UNIT_OUT, a.num_out - first)};
        for (long p = begin; p < end; p += D::ROWS) {
            int rows = std::min<long>(D::ROWS, end - p);
            const X *from[D::ROWS];
            float *to[D::ROWS];
            for (int row = 0; row < rows; row++) {
                from[row] = x + pairs.order[p + row] / pairs.pairs_a_row * stride;
                to[row] = y + pairs.order[p + row] * a.num_out + first;
            }
            p == begin ? unit.template multiply<true>(rows, from, to) : unit.template multiply<false>(rows, from, to);
        }
    });
}

// -- products of weights in groups ------------------------------------------------------------------------------------

// Round the rows of x of a segment's pairs to int8.
template <class K, class Shape>
void round_segment(const Experts &a, const Pairs &pairs, Segment segment, const GroupedSizes<K> &sizes, char *x) {
    Runs<Shape> runs(segment.end - segment.begin);
    for (long run = 0; run < runs.num; run++) {
        const bfloat16 *rows[Shape::MOST];
        for (long row = 0; row < runs.size(run); row++) {
            long pair = pairs.order[segment.begin + runs.row(run) + row];
            rows[row] = static_cast<const bfloat16 *>(a.x) + pair / pairs.pairs_a_row * a.num_in;
        }
        round_rows<K, Shape::MOST, Shape::LEAST>(runs.size(run), rows, a.num_in, sizes.num_groups, a.zero,
                                                 x + runs.row(run) * sizes.row_bytes);
    }
}

// y [pairs, num_out] = x @ weight.T + bias
template <class K> void grouped_products(const Experts &a, Pairs &pairs, float *y) {
    const GroupedSizes<K> sizes(a.num_in, a.num_out);
    pairs.split(std::max(1L, X_BYTES / sizes.row_bytes));
    long num_segments = pairs.segments.size();
    char *x = memory_of_x(sizes, a.num_pairs(), num_segments);
    auto x_of = [&](long s) { return x + (pairs.segments[s].begin + s * PADDING) * sizes.row_bytes; };
    parallel_for(num_segments, a.num_pairs() * a.num_in > WORTH_A_THREAD ? a.num_threads : 1, [&](long s) {
        auto segment = pairs.segments[s];
        with_tiles<K>(segment.end - segment.begin, [&](auto shape) {
            round_segment<K, decltype(shape)>(a, pairs, segment, sizes, x_of(s));
        });
    });
    auto *bias = static_cast<const bfloat16 *>(a.bias);
    parallel_for(num_segments * sizes.num_tiles, threads_for(a, pairs), [&](long i) {
        auto segment = pairs.segments[i / sizes.num_tiles];
        long tile = i % sizes.num_tiles;
        auto *blocks = static_cast<const uint8_t *>(a.weight) + segment.expert * sizes.num_tiles * sizes.tile_bytes;
        with_tiles<K>(segment.end - segment.begin, [&](auto shape) {
            typedef decltype(shape) Shape;
            if (tile % Shape::TILES) return;  // computed with the one before
            Runs<Shape> runs(segment.end - segment.begin);
            auto *sums = multiply_tile<K, Shape>(blocks, sizes, tile, x_of(i / sizes.num_tiles), runs, 0, runs.num);
            for (long p = segment.begin; p < segment.end; p++, sums += Shape::TILES * TILE_OUT)
                write_sums(sums, tile, Shape::TILES, bias ? bias + segment.expert * a.num_out : nullptr, a.num_out,
                           y + pairs.order[p] * a.num_out);
        });
    });
}

// -- the operations ---------------------------------------------------------------------------------------------------

constexpr long CHUNK_TOKENS = 512;  // bounds the scratch memory

typedef void Product(const Experts &, Pairs &, float *);

// product(some tokens, their pairs, y [pairs, num_out]), then finish(these tokens, y)
template <class T, class Finish> void in_chunks(const Experts &all, bool is_in, Product *product, Finish finish) {
    long x_size = (is_in ? 1 : all.top_k) * all.num_in, out_size = is_in ? all.top_k * all.num_out / 2 : all.num_out;
    for (long first = 0; first < all.num_tokens; first += CHUNK_TOKENS) {
        Experts a = all;
        a.num_tokens = std::min(CHUNK_TOKENS, all.num_tokens - first);
        a.x = static_cast<const T *>(all.x) + first * x_size, a.out = static_cast<T *>(all.out) + first * out_size;
        a.experts += first * all.top_k, a.weights += first * all.top_k;
        Pairs pairs(a, is_in ? a.top_k : 1);
        float *y = scratch<4>(a.num_pairs() * a.num_out);
        product(a, pairs, y);
        finish(a, y);
    }
}

enum ExpertGate { SILU, GELU, SWIGLU };

template <ExpertGate GATE, class T> void gate_pair(const Experts &a, const float *gate_up, T *out) {
    long inner = a.num_out / 2;
    for (long i = 0; i < inner; i++) {
        float gate = gate_up[i], up = gate_up[inner + i], z = gate;  // gate * sigmoid(z) * up
        if (GATE == GELU) z = gate * (1.59576912f + 0.0713548163f * gate * gate);
        if (GATE == SWIGLU) {
            gate = std::min(gate, a.limit), z = a.alpha * gate;
            up = std::max(std::min(up, a.limit), -a.limit) + 1.0f;
        }
        float e = exp_of_negative(-std::fabs(z));
        out[i] = narrow<T>(gate * (z < 0 ? e : 1.0f) / (1.0f + e) * up);
    }
}

template <class T> void experts_in(const Experts &all, Product *product) {
    auto gate_pair_of = all.gate == SILU ? gate_pair<SILU, T> : all.gate == GELU ? gate_pair<GELU, T> : gate_pair<SWIGLU, T>;
    in_chunks<T>(all, true, product, [&](const Experts &a, const float *y) {
        long num_pairs = a.num_pairs(), size = num_pairs * a.num_out;
        parallel_for(num_pairs, size > WORTH_A_THREAD ? a.num_threads : 1, [&](long pair) {
            gate_pair_of(a, y + pair * a.num_out, static_cast<T *>(a.out) + pair * (a.num_out / 2));
        });
    });
}

template <class T> void experts_out(const Experts &all, Product *product) {
    in_chunks<T>(all, false, product, [&](const Experts &a, const float *y) {
        long size = a.num_pairs() * a.num_out;
        parallel_for(a.num_tokens, size > WORTH_A_THREAD ? a.num_threads : 1, [&](long token) {
            float *total = scratch<5>(a.num_out);
            std::fill_n(total, a.num_out, 0.0f);
            for (long pair = token * a.top_k; pair < (token + 1) * a.top_k; pair++)
                for (long i = 0; i < a.num_out; i++) total[i] += a.weights[pair] * y[pair * a.num_out + i];
            T *out = static_cast<T *>(a.out) + token * a.num_out;
            for (long i = 0; i < a.num_out; i++) out[i] = narrow<T>(total[i]);
        });
    });
}
