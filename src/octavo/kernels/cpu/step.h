// A decode step before and after the model: its inputs from the state of the rows, its tokens from the logits, and these
// back to the rows. Names and rules are those of `reference.step` and `reference.sampling`.
//
// Part of native.cpp.

// -- rows -------------------------------------------------------------------------------------------------------------

// Columns of `row_state.RowState.sampling_params`: int64, those of TEMPERATURE, TOP_P and MIN_P the bits of a float64.
enum Column { TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, SAMPLE_INDEX, NUM_LOGPROBS, FIRST_STOP_ID };
constexpr int NOTHING_SAMPLED = -1, NOT_FINITE = -2;  // in the ring

struct PrepareDecode {
    const int64_t *rows, *depths, *ends;  // [num_lines]
    // of the state of the rows
    int32_t *tables;  // [num_rows + 1, num_tables, max_blocks]: of the groups, and where states are written and read
    const int64_t *last_token, *num_computed, *drafts, *params;
    const uint8_t *done;
    // to fill, [num_lines]; tables of window groups are [num_groups - 1, num_lines, max_blocks]
    int64_t *live_rows, *token_ids, *positions, *slots, *window_slots;
    int32_t *seq_lens, *block_tables, *window_tables, *state_tables, *state_reads;
    float *temperature, *top_p, *min_p;
    int32_t *top_k;
    int64_t *seed, *sample_index, *position;
    long num_lines, null_row, num_groups, num_tables, max_blocks, state_blocks, max_drafts, num_columns, block_size;
    long window_slots_stride, window_tables_stride;  // from group to group
};

inline double as_double(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline void prepare_decode(const PrepareDecode &a) {
    long num_blocks = 1;  // tables are filled up to the longest sequence
    for (long i = 0; i < a.num_lines; i++) {
        long row = a.rows[i], depth = a.depths[i];
        int64_t draft = depth ? a.drafts[row * a.max_drafts + depth - 1] : a.last_token[row];
        long position = a.num_computed[row] + depth;
        bool live = position < a.ends[i] && !a.done[row] && (!depth || draft >= 0);
        if (!live) position = 0;
        a.live_rows[i] = live ? row : a.null_row;
        a.token_ids[i] = std::max<int64_t>(draft, 0);
        a.positions[i] = position, a.position[i] = position + 1;
        a.seq_lens[i] = live ? position + 1 : 0;
        num_blocks = std::max(num_blocks, position / a.block_size + 1);
        const int64_t *params = a.params + row * a.num_columns;
        a.temperature[i] = as_double(params[TEMPERATURE]);
        a.top_p[i] = as_double(params[TOP_P]), a.min_p[i] = as_double(params[MIN_P]);
        a.top_k[i] = params[TOP_K], a.seed[i] = params[SEED], a.sample_index[i] = params[SAMPLE_INDEX];
    }
    for (long i = 0; i < a.num_lines; i++) {
        long position = a.positions[i], block = position / a.block_size;
        bool live = a.seq_lens[i];
        const int32_t *from = a.tables + a.rows[i] * a.num_tables * a.max_blocks;
        for (long group = 0; group < a.num_groups; group++, from += a.max_blocks) {
            int64_t *slots = group ? a.window_slots + (group - 1) * a.window_slots_stride : a.slots;
            int32_t *to = group ? a.window_tables + (group - 1) * a.window_tables_stride : a.block_tables;
            slots[i] = live ? from[block] * a.block_size + position % a.block_size : 0;
            memcpy(to + i * a.max_blocks, from, num_blocks * sizeof *to);
        }
        const int32_t *writes = from, *reads = from + a.max_blocks;
        for (long block = 0; block < a.state_blocks; block++) {
            a.state_tables[i * a.state_blocks + block] = live ? writes[block] : 0;
            a.state_reads[i * a.state_blocks + block] = live ? reads[block] : 0;
        }
    }
    for (long i = 0; i < a.num_lines && a.state_blocks; i++) {  // what a pass writes, the next one of the row reads
        int32_t *writes = a.tables + (a.rows[i] * a.num_tables + a.num_groups) * a.max_blocks;
        if (a.seq_lens[i]) memcpy(writes + a.max_blocks, writes, a.state_blocks * sizeof *writes);
    }
}

struct CommitTokens {
    const int64_t *rows, *tokens, *positions, *step_counter;
    int32_t *ring;  // [num_columns, ring_width]
    int64_t *last_token, *num_computed;
    uint8_t *done;
    int32_t *history;  // [num_rows + 1, max_len]
    const int64_t *params;
    long num_tokens, ring_width, max_len, num_columns;
};

inline void commit_tokens(const CommitTokens &a) {
    int32_t *results = a.ring + *a.step_counter * a.ring_width;
    for (long i = 0; i < a.num_tokens; i++) {
        long row = a.rows[i], token = a.tokens[i];
        results[i] = a.done[row] ? NOTHING_SAMPLED : token < 0 ? token + NOT_FINITE + 1 : token;
        if (a.done[row] || token < 0) continue;
        if (a.max_len) a.history[row * a.max_len + a.positions[i]] = token;
        a.last_token[row] = token, a.num_computed[row] = a.positions[i];
    }
    for (long i = 0; i < a.num_tokens; i++) {  // a row may have several tokens, and all of them count
        long row = a.rows[i], token = a.tokens[i];
        const int64_t *stop_ids = a.params + row * a.num_columns + FIRST_STOP_ID;
        bool stops = token == -1 || token == -2 || std::count(stop_ids, a.params + (row + 1) * a.num_columns, token);
        if (results[i] != NOTHING_SAMPLED && stops) a.done[row] = 1;
    }
    ++*const_cast<int64_t *>(a.step_counter);
}

// -- sampling ---------------------------------------------------------------------------------------------------------

// Sampling is an exponential race (`reference.sample`): the score of a token is its logit / temperature minus the
// logarithm of a waiting time, and the largest score wins. Two logarithms for each token of the vocabulary would take
// most of a small model's step. But few tokens can win: a waiting time is at least its uniform number, whose logarithm
// is at least that of its binary exponent. Only tokens that beat the leader with this bound get an exact score: some
// dozens.

constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15, MIX_1 = 0xbf58476d1ce4e5b9, MIX_2 = 0x94d049bb133111eb;
constexpr long LAP = 128;  // tokens between two updates of the leader

inline uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * MIX_1;
    z = (z ^ z >> 27) * MIX_2;
    return z ^ z >> 31;
}

// `reference.noise_keys`
inline uint64_t noise_key(uint64_t seed, uint64_t sample_index, uint64_t position) {
    return mix(mix(mix(seed + GOLDEN) + sample_index + GOLDEN) + position + GOLDEN);
}

inline float uniform_of(uint32_t bits) { return (float(bits) + 0.5f) * 0x1p-32f; }

inline float min_log_wait(uint32_t bits) {
    float uniform = uniform_of(bits);
    int32_t word;
    memcpy(&word, &uniform, sizeof word);
    return 0.6931472f * float((word >> 23) - 127) - 1e-3f;  // minus the rounding error of the exact value
}

inline float log_wait(uint32_t bits) {
    return std::log(-std::log1p(-std::min(uniform_of(bits), 1.0f - 0x1p-24f)));
}

template <class T> long sample_row(const T *logits, long size, float temperature, uint64_t key) {
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
        int num_candidates = 0;
        for (long i = 0; i < count; i++) {
            scores[i] = wide(logits[begin + i]) / temperature;
            num_candidates += scores[i] - min_log_wait(bits[i]) > lead;
        }
        for (long i = 0; num_candidates && i < count; i++) {
            if (!(scores[i] - min_log_wait(bits[i]) > lead)) continue;
            float score = scores[i] - log_wait(bits[i]);
            if (score > lead) lead = score, winner = begin + i;
        }
    }
    return winner;
}

struct Sample {
    const void *logits;        // [num_rows, size]
    const float *temperature;  // [num_rows], 0, if `is_checked`: the largest logit, the first of equals
    const int64_t *seed, *sample_index, *position;  // [num_rows]
    int64_t *token_ids;        // [num_rows], the sampled tokens; -1 for a row with NaN or infinity, if `is_checked`
    long num_rows, size, first;  // first: token of the first column, from which token ids count
    int is_checked, num_threads;
};

template <class T> void sample(const Sample &a) {
    constexpr long PART = 4096;
    long num_parts = (a.size + PART - 1) / PART;
    float *largest = scratch<0>(a.num_rows * num_parts);
    auto *logits = static_cast<const T *>(a.logits);
    if (a.is_checked)
        parallel_for(a.num_rows * num_parts, a.num_threads, [&](long i) {
            long begin = i % num_parts * PART, count = std::min(PART, a.size - begin);
            const T *from = logits + i / num_parts * a.size + begin;
            float most = -INFINITY, zero = 0;
#pragma omp simd reduction(max : most) reduction(+ : zero)
            for (long k = 0; k < count; k++) {
                float x = wide(from[k]);
                most = x > most ? x : most;
                zero += x - x;  // NaN, if x is not finite
            }
            largest[i] = zero == 0 ? most : NAN;
        });
    parallel_for(a.num_rows, a.num_rows > 1 ? a.num_threads : 1, [&](long row) {
        const float *parts = largest + row * num_parts;
        const T *from = logits + row * a.size;
        long token = -1;
        if (a.is_checked && std::any_of(parts, parts + num_parts, [](float x) { return x != x; })) {
        } else if (a.temperature[row] == 0) {
            long part = std::max_element(parts, parts + num_parts) - parts;
            for (token = part * PART; wide(from[token]) != parts[part];) token++;
        } else {
            uint64_t key = noise_key(a.seed[row], a.sample_index[row], a.position[row]);
            token = sample_row(from, a.size, a.temperature[row], key + a.first * GOLDEN);
        }
        a.token_ids[row] = token;
    });
}
