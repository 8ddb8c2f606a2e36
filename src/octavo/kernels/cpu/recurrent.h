// Gated DeltaNets: `kernels/reference/recurrent.py` defines the operations, and the line of numbers that a state is.
//
// Part of native.cpp. Everything is computed position by position: the columns of a state are independent, so some columns
// of one head are a unit of work and stay in the core's first cache. Its bits depend neither on the other sequences, nor
// on where a slice begins or ends.

// The states of a batch: number i of sequence s's is number i % width of block reads[s, i / width] before it, and of block
// tables[s, i / width] after it.
struct States {
    float *pool;            // [num_blocks + 1, width]
    const int32_t *tables, *reads;  // [num_seqs, table_width]
    const int32_t *query_start, *seq_lens;
    long num_seqs, first, width, table_width;

    long begin(long s) const { return query_start[s]; }
    long end(long s) const { return query_start[s + 1]; }
    bool is_new(long s) const { return seq_lens[s] <= end(s) - begin(s); }

    // copy(numbers of the state, row, first column, how many) for rows of `size` numbers, `stride` apart, from `at` on.
    // of: tables or reads
    template <class Copy> void visit(const int32_t *of, long s, long at, long rows, long size, long stride, const Copy &copy) const {
        const int32_t *table = of + s * table_width + (first + at) / width;
        long offset = (first + at) % width;
        for (long row = 0; row < rows;) {
            for (; offset >= width; offset -= width) table++;
            long whole = offset + size <= width ? std::min(rows - row, (width - offset - size) / stride + 1) : 0;
            float *numbers = pool + *table * width + offset;
            for (long end = row + whole; row < end; row++, offset += stride, numbers += stride) copy(numbers, row, 0L, size);
            if (whole) continue;
            for (long done = 0; done < size;) {  // a row of several blocks
                long start = offset + done, num = std::min(size - done, width - start % width);
                copy(pool + table[start / width] * width + start % width, row, done, num);
                done += num;
            }
            row++, offset += stride;
        }
    }
};

inline float sigmoid(float x) {
    float e = exp_of_negative(-std::fabs(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// -- convolution ------------------------------------------------------------------------------------------------------

struct CausalConv {
    States states;
    const void *x;        // [num_tokens, num_channels], x_stride apart
    const float *weight;  // [num_channels, size]
    void *out;            // [num_tokens, num_channels]
    long x_stride, num_channels, size;
    int num_threads;
};

constexpr long CONV_CHANNELS = 128;  // of a unit

template <class T> void causal_conv(const CausalConv &a) {
    const States &states = a.states;
    long num_units = (a.num_channels + CONV_CHANNELS - 1) / CONV_CHANNELS, before = a.size - 1;
    long size = states.end(states.num_seqs - 1) * a.num_channels * a.size;
    parallel_for(states.num_seqs * num_units, size > WORTH_A_THREAD ? a.num_threads : 1, [&](long unit) {
        long s = unit / num_units, first = unit % num_units * CONV_CHANNELS;
        long width = std::min(CONV_CHANNELS, a.num_channels - first);
        // Inputs of the last `size` positions, a ring of rows, and the weights of each of them.
        float *rows = scratch<0>(2 * a.size * CONV_CHANNELS), *taps = rows + a.size * CONV_CHANNELS;
        for (long tap = 0; tap < a.size; tap++)
            for (long c = 0; c < width; c++) taps[tap * CONV_CHANNELS + c] = a.weight[(first + c) * a.size + tap];
        std::fill_n(rows, a.size * CONV_CHANNELS, 0.0f);
        if (!states.is_new(s))
            states.visit(states.reads, s, first, before, width, a.num_channels, [&](const float *from, long row, long done, long num) {
                memcpy(rows + row * CONV_CHANNELS + done, from, num * sizeof *from);
            });
        long next = before;  // the row of the next position
        for (long t = states.begin(s); t < states.end(s); t++) {
            widen(static_cast<const T *>(a.x) + t * a.x_stride + first, width, rows + next * CONV_CHANNELS);
            next = (next + 1) % a.size;
            float sums[CONV_CHANNELS] = {};
            for (long tap = 0; tap < a.size; tap++) {
                const float *row = rows + (next + tap) % a.size * CONV_CHANNELS, *weights = taps + tap * CONV_CHANNELS;
                for (long c = 0; c < CONV_CHANNELS; c++) sums[c] += row[c] * weights[c];
            }
            for (long c = 0; c < CONV_CHANNELS; c++) sums[c] *= sigmoid(sums[c]);
            T *out = static_cast<T *>(a.out) + t * a.num_channels + first;
            for (long c = 0; c < width; c++) out[c] = narrow<T>(sums[c]);
        }
        states.visit(states.tables, s, first, before, width, a.num_channels, [&](float *to, long row, long done, long num) {
            memcpy(to, rows + (next + 1 + row) % a.size * CONV_CHANNELS + done, num * sizeof *to);
        });
    });
}

// -- delta rule -------------------------------------------------------------------------------------------------------

struct DeltaRule {
    States states;
    const void *q, *k, *v;     // [num_tokens, num_key_heads, key_dim], v [num_tokens, num_heads, value_dim]; strides of tokens
    const float *decay, *beta;  // [num_tokens, num_heads]
    void *out;                  // [num_tokens, num_heads, value_dim]
    long q_stride, k_stride, v_stride, num_heads, num_key_heads, key_dim, value_dim;
    int num_threads;
};

constexpr long STRIP = 32, STRIP_PARTS = STRIP / LANES;  // columns of a state
constexpr long SUMS_AT_ONCE = 4;                         // of rows: their additions overlap
constexpr long STEPS = 64;  // positions for which the keys and queries of a head stay in the second cache
constexpr float L2_EPS = 1e-6f;

inline void copy_columns(const float *from, float *to, long num) {
    if (num == STRIP)
        memcpy(to, from, STRIP * sizeof *to);  // without a call
    else
        memcpy(to, from, num * sizeof *to);
}

// Heads of length `scale`, padded with zeros.
template <class T> void normalise(const T *from, long size, long padded, float scale, float *to) {
    float squares[COLUMNS] = {};
    widen(from, size, to);
    std::fill_n(to + size, padded - size, 0.0f);
    for (long i = 0; i < size; i++) squares[i % COLUMNS] += to[i] * to[i];
    float total = L2_EPS;
    for (float square : squares) total += square;
    scale /= std::sqrt(total);
    for (long i = 0; i < size; i++) to[i] *= scale;
}

// One position of some columns: strip [rows, STRIP] is modified.
inline void delta_step(Floats *strip, long rows, const float *q, const float *k, float factor, float beta, const float *v, float *out) {
    Floats found[SUMS_AT_ONCE][STRIP_PARTS] = {}, added[STRIP_PARTS];
    for (long i = 0; i < rows; i += SUMS_AT_ONCE)
        for (long n = 0; n < SUMS_AT_ONCE; n++)
            for (long p = 0; p < STRIP_PARTS; p++) found[n][p] += k[i + n] * strip[(i + n) * STRIP_PARTS + p];
    for (long p = 0; p < STRIP_PARTS; p++) {
        Floats sum = (found[0][p] + found[1][p]) + (found[2][p] + found[3][p]);
        added[p] = beta * (load<Floats>(v + p * LANES) - factor * sum);
    }
    Floats sums[SUMS_AT_ONCE][STRIP_PARTS] = {};
    for (long i = 0; i < rows; i += SUMS_AT_ONCE)
        for (long n = 0; n < SUMS_AT_ONCE; n++)
            for (long p = 0; p < STRIP_PARTS; p++) {
                Floats &state = strip[(i + n) * STRIP_PARTS + p];
                state = factor * state + k[i + n] * added[p];
                sums[n][p] += q[i + n] * state;
            }
    for (long p = 0; p < STRIP_PARTS; p++) {
        Floats sum = (sums[0][p] + sums[1][p]) + (sums[2][p] + sums[3][p]);
        memcpy(out + p * LANES, &sum, sizeof sum);
    }
}

template <class T> void delta_rule(const DeltaRule &a) {
    const States &states = a.states;
    long num_tokens = states.end(states.num_seqs - 1), group = a.num_heads / a.num_key_heads;
    long rows = (a.key_dim + SUMS_AT_ONCE - 1) / SUMS_AT_ONCE * SUMS_AT_ONCE, keys = a.num_key_heads * rows;
    float *q = scratch<0>(2 * num_tokens * keys), *k = q + num_tokens * keys;
    bool is_large = num_tokens * a.num_heads * a.key_dim * a.value_dim > WORTH_A_THREAD;
    parallel_for(num_tokens, is_large ? a.num_threads : 1, [&](long t) {
        for (long h = 0; h < a.num_key_heads; h++) {
            long at = t * keys + h * rows, from = h * a.key_dim;
            normalise(static_cast<const T *>(a.q) + t * a.q_stride + from, a.key_dim, rows, 1 / std::sqrt(float(a.key_dim)), q + at);
            normalise(static_cast<const T *>(a.k) + t * a.k_stride + from, a.key_dim, rows, 1.0f, k + at);
        }
    });
    parallel_for(states.num_seqs * a.num_heads, is_large ? a.num_threads : 1, [&](long unit) {
        long s = unit / a.num_heads, h = unit % a.num_heads, key_head = h / group;
        auto *strip = reinterpret_cast<Floats *>(scratch<1>(rows * STRIP));
        for (long begin = states.begin(s); begin < states.end(s); begin += STEPS)
            for (long c = 0; c < a.value_dim; c += STRIP) {
                long end = std::min(begin + STEPS, states.end(s)), width = std::min(STRIP, a.value_dim - c);
                auto visit = [&](const int32_t *of, auto copy) {
                    states.visit(of, s, h * a.key_dim * a.value_dim + c, a.key_dim, width, a.value_dim, copy);
                };
                bool is_first = begin == states.begin(s), is_new = is_first && states.is_new(s);
                if (is_new || width < STRIP || rows > a.key_dim) std::fill_n(reinterpret_cast<float *>(strip), rows * STRIP, 0.0f);
                if (!is_new)
                    visit(is_first ? states.reads : states.tables, [&](const float *from, long row, long done, long num) {
                        copy_columns(from, reinterpret_cast<float *>(strip) + row * STRIP + done, num);
                        __builtin_prefetch(from + num);  // the next columns
                    });
                for (long t = begin; t < end; t++) {
                    long at = t * keys + key_head * rows, value = h * a.value_dim + c;
                    float v[STRIP] = {}, out[STRIP];
                    widen(static_cast<const T *>(a.v) + t * a.v_stride + value, width, v);
                    delta_step(strip, rows, q + at, k + at, std::exp(a.decay[t * a.num_heads + h]), a.beta[t * a.num_heads + h], v, out);
                    T *to = static_cast<T *>(a.out) + t * a.num_heads * a.value_dim + value;
                    for (long i = 0; i < width; i++) to[i] = narrow<T>(out[i]);
                }
                visit(states.tables, [&](float *to, long row, long done, long num) {
                    copy_columns(reinterpret_cast<float *>(strip) + row * STRIP + done, to, num);
                });
            }
    });
}

// -- gates ------------------------------------------------------------------------------------------------------------

// Rows of a gate are parts of longer rows, gate_stride apart. The bits of a row do not depend on the other rows.

struct DeltaGates {
    const void *a, *b;                  // [num_tokens, num_heads]
    const float *log_decay, *step_bias;  // [num_heads]
    float *decay, *beta;                 // [num_tokens, num_heads]
    long num_tokens, num_heads, a_stride, b_stride;
};

template <class T> void delta_gates(const DeltaGates &g) {
    auto *a = static_cast<const T *>(g.a), *b = static_cast<const T *>(g.b);
    for (long t = 0; t < g.num_tokens; t++)
        for (long h = 0; h < g.num_heads; h++) {
            float step = wide(a[t * g.a_stride + h]) + g.step_bias[h];
            float softplus = std::max(step, 0.0f) + std::log1p(std::exp(-std::fabs(step)));
            g.decay[t * g.num_heads + h] = -std::exp(g.log_decay[h]) * softplus;
            g.beta[t * g.num_heads + h] = sigmoid(wide(b[t * g.b_stride + h]));
        }
}

struct GatedNorm {
    const void *x;        // [num_tokens, num_heads, size]
    const float *weight;  // [size]
    const void *gate;     // [num_tokens, num_heads * size]
    void *out;
    float eps;
    long num_tokens, num_heads, size, gate_stride;
    int num_threads;
};

template <class T> void gated_rms_norm(const GatedNorm &a) {
    long width = a.num_heads * a.size;
    parallel_for(a.num_tokens, a.num_tokens * width > WORTH_A_THREAD ? a.num_threads : 1, [&](long t) {
        float *numbers = scratch<0>(a.size);
        for (long h = 0; h < a.num_heads; h++) {
            auto *gate = static_cast<const T *>(a.gate) + t * a.gate_stride + h * a.size;
            T *out = static_cast<T *>(a.out) + t * width + h * a.size;
            widen(static_cast<const T *>(a.x) + t * width + h * a.size, a.size, numbers);
            rms_norm_row(numbers, a.weight, a.eps, a.size, out);
            for (long i = 0; i < a.size; i++) out[i] = narrow<T>(wide(out[i]) * wide(gate[i]) * sigmoid(wide(gate[i])));
        }
    });
}

struct SigmoidGate {
    const void *x, *gate;  // [num_rows, size]; or gate [num_rows] float32
    void *out;
    long num_rows, size, gate_stride;
    int is_column, num_threads;
};

template <class T> void sigmoid_mul(const SigmoidGate &a) {
    parallel_for(a.num_rows, a.num_rows * a.size > WORTH_A_THREAD ? a.num_threads : 1, [&](long row) {
        auto *x = static_cast<const T *>(a.x) + row * a.size, *gate = static_cast<const T *>(a.gate) + row * a.gate_stride;
        T *out = static_cast<T *>(a.out) + row * a.size;
        float column = a.is_column ? rounded<T>(sigmoid(static_cast<const float *>(a.gate)[row * a.gate_stride])) : 0.0f;
        for (long i = 0; i < a.size; i++)
            out[i] = narrow<T>(wide(x[i]) * (a.is_column ? column : rounded<T>(sigmoid(wide(gate[i])))));
    });
}
