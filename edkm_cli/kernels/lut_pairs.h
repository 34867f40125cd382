/* The same product for bfloat16 activations and tables of at most 16 entries, where the processor multiplies pairs of
 * bfloat16 and adds them in float32 (AVX-512 BF16): tables are rounded to bfloat16, as the dense weight would be, and 32
 * entries are looked up by one permute of words. Included by lut_linear.c; the structure is that of its float32 loops.
 */
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define HAS_PAIRS 1

#define PAIR_DEPTH 512 /* columns decoded at a time: 8 KiB of weights, 16 KiB of x for each panel */

/* Entries of a group as words, repeated until they fill 32 lanes. */
INLINE __m512i word_table(const void *lut, int64_t dtype, int64_t group, int bits) {
    if (dtype == FLOAT16 && bits == 3) {
        __m256 entries = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)lut + group));
        return _mm512_broadcast_i32x4((__m128i)_mm256_cvtneps_pbh(entries));
    }
    __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)small_table(lut, dtype, group, bits));
    return _mm512_broadcast_i64x4(half);
}

/* 64 weights: words of columns 0 to 31 and of 32 to 63. `inside`: which of the 8 * bits bytes may be read. */
INLINE void words64(const Unpacker *u, __m512i table, const uint8_t *p, __mmask32 inside, __m512i w[2]) {
    __m512i bytes = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(inside, p));
    bytes = _mm512_permutexvar_epi8(_mm512_load_si512(u->window_words), bytes);
    bytes = _mm512_multishift_epi64_epi8(_mm512_load_si512(u->shift_words), bytes);
    w[0] = _mm512_permutexvar_epi16(bytes, table);
    w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 8), table);
}

INLINE __mmask32 first_bytes(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }
INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

/* `few` of lut_linear.c. x is read as words; runs of a tile that are shorter than 64 read it under a mask. */
INLINE void few_pairs(
    int tokens, const Call *call, const Part *part, const Unpacker *u, int64_t row, int count, const uint16_t *x, vf sums[][UNIT]
) {
    int64_t step = 8 * call->bits, stride = call->x_stride, tile = part->tile_columns, in_row = row_bytes(call);
    __mmask32 all = first_bytes(step);
    for (int r = 0; r < count; r++) {
        const uint8_t *bytes = part->indices + (row + r) * in_row;
        __m512 acc[4][4];
        __m512i w[2], more[2];
        for (int n = 0; n < tokens; n++)
            for (int v = 0; v < 4; v++) acc[n][v] = _mm512_setzero_ps();
        for (int64_t from = 0; from < call->columns; from += tile) {
            const uint8_t *p = bytes + from * call->bits / 8;
            const uint16_t *at = x + from, *stop = at + tile;
            __m512i table = word_table(part->lut, part->lut_dtype, group_at(call, part, row + r, from), call->bits);
            for (; at + 128 <= stop; at += 128, p += 2 * step) {
                __builtin_prefetch(p + AHEAD);
                words64(u, table, p, all, w);
                words64(u, table, p + step, all, more);
                for (int n = 0; n < tokens; n++)
                    for (int v = 0; v < 2; v++) {
                        acc[n][v] = add_pairs(acc[n][v], w[v], _mm512_loadu_si512(at + n * stride + 32 * v));
                        acc[n][v + 2] = add_pairs(acc[n][v + 2], more[v], _mm512_loadu_si512(at + n * stride + 64 + 32 * v));
                    }
            }
            for (; at < stop; at += 64, p += step) {
                int64_t left = stop - at;
                words64(u, table, p, left >= 64 ? all : first_bytes((left * call->bits + 7) / 8), w);
                for (int v = 0; v < 2; v++) {
                    __mmask32 lanes = left >= 32 * v + 32 ? ~0u : left > 32 * v ? (1u << (left - 32 * v)) - 1 : 0;
                    for (int n = 0; n < tokens; n++)
                        acc[n][v] = add_pairs(acc[n][v], w[v], _mm512_maskz_loadu_epi16(lanes, at + n * stride + 32 * v));
                }
            }
        }
        for (int n = 0; n < tokens; n++)
            sums[n][r] = (vf)_mm512_add_ps(_mm512_add_ps(acc[n][0], acc[n][1]), _mm512_add_ps(acc[n][2], acc[n][3]));
    }
}

/* Words of columns [from, end) of one row, zeros up to a multiple of 64. */
INLINE void decode_words(
    const Call *call, const Part *part, const Unpacker *u, int64_t row, int64_t from, int64_t end, uint16_t *to
) {
    const uint8_t *bytes = part->indices + row * row_bytes(call);
    __m512i w[2];
    for (int64_t start = from; from < end;) {
        int64_t stop = smaller(end, (from / part->tile_columns + 1) * part->tile_columns);
        __m512i table = word_table(part->lut, part->lut_dtype, group_at(call, part, row, from), call->bits);
        for (; from < stop; from += 64) {
            int64_t left = stop - from;
            words64(u, table, bytes + from * call->bits / 8, first_bytes((smaller(left, 64) * call->bits + 7) / 8), w);
            for (int v = 0; v < 2; v++) {
                __mmask32 lanes = left >= 32 * v + 32 ? ~0u : left > 32 * v ? (1u << (left - 32 * v)) - 1 : 0;
                _mm512_storeu_si512(to + from - start + 32 * v, _mm512_maskz_mov_epi16(lanes, w[v]));
            }
        }
        from = stop;
    }
}

/* `multiply` of lut_linear.c: two columns at a time. */
INLINE void multiply_pairs(
    int panels, const uint16_t *w, const uint16_t *x, int64_t pairs, int64_t panel_stride, vf acc[][STRIP]
) {
    for (int64_t from = 0; from < pairs; from += 64) {
        int64_t end = smaller(from + 64, pairs);
        __m512 sums[2][STRIP];
        for (int i = 0; i < STRIP; i++) sums[0][i] = sums[1][i] = _mm512_setzero_ps();
        for (int64_t k = from; k < end; k++) {
            __m512i first = _mm512_loadu_si512(x + k * 2 * LANES), second = first;
            if (panels > 1) second = _mm512_loadu_si512(x + panel_stride + k * 2 * LANES);
            for (int i = 0; i < STRIP; i++) {
                int32_t pair;
                memcpy(&pair, w + i * (PAIR_DEPTH + 64) + 2 * k, 4);
                __m512i weight = _mm512_set1_epi32(pair);
                sums[0][i] = add_pairs(sums[0][i], weight, first);
                if (panels > 1) sums[1][i] = add_pairs(sums[1][i], weight, second);
            }
        }
        for (int p = 0; p < panels; p++)
            for (int i = 0; i < STRIP; i++) acc[p][i] += (vf)sums[p][i];
    }
}

#define FEW_PAIRS(tokens)                                                                                               \
    NOINLINE few_pairs_##tokens(                                                                                        \
        const Call *call, const Part *part, const Unpacker *u, int64_t row, int count, const uint16_t *x, vf sums[][UNIT] \
    ) {                                                                                                                 \
        few_pairs(tokens, call, part, u, row, count, x, sums);                                                          \
    }
FEW_PAIRS(1) FEW_PAIRS(2) FEW_PAIRS(3) FEW_PAIRS(4)
typedef void FewPairs(const Call *, const Part *, const Unpacker *, int64_t row, int count, const uint16_t *x, vf sums[][UNIT]);
static FewPairs *const FEW_PAIRS[] = {few_pairs_1, few_pairs_2, few_pairs_3, few_pairs_4};

NOINLINE multiply_pairs_1(const uint16_t *w, const uint16_t *x, int64_t pairs, vf acc[][STRIP]) {
    multiply_pairs(1, w, x, pairs, 0, acc);
}
NOINLINE multiply_pairs_2(const uint16_t *w, const uint16_t *x, int64_t pairs, int64_t panel_stride, vf acc[][STRIP]) {
    multiply_pairs(2, w, x, pairs, panel_stride, acc);
}

/* Sums of a strip of rows of W with all panels of 16 tokens, for `many_tokens`. */
static void strip_pairs(
    const Call *call, const Part *part, const Unpacker *u, int64_t row, int count, int64_t token, int panels, vf acc[][STRIP]
) {
    uint16_t w[STRIP * (PAIR_DEPTH + 64)] __attribute__((aligned(64)));
    if (count < STRIP) memset(w, 0, sizeof w);
    int64_t panel_stride = LANES * call->x_stride;
    for (int64_t from = 0; from < call->columns; from += PAIR_DEPTH) {
        int64_t end = smaller(from + PAIR_DEPTH, call->columns), pairs = (end - from + 1) / 2;
        for (int i = 0; i < count; i++) decode_words(call, part, u, row + i, from, end, w + i * (PAIR_DEPTH + 64));
        prefetch_strip(call, part, row + STRIP, from, end);
        const uint16_t *x = (const uint16_t *)call->x + token * call->x_stride + from * LANES;
        int p = 0;
        for (; p + 2 <= panels; p += 2) multiply_pairs_2(w, x + p * panel_stride, pairs, panel_stride, acc + p);
        if (p < panels) multiply_pairs_1(w, x + p * panel_stride, pairs, acc + p);
    }
}

/* Whether this product goes by pairs: no tile may start inside a byte. */
static int takes_pairs(const Call *call) {
    if (call->out_dtype != BFLOAT16 || call->meaning != SMALL) return 0;
    for (int64_t p = 0; p < call->count; p++)
        if (call->parts[p].tile_columns != call->columns && call->parts[p].tile_columns % 8) return 0;
    return 1;
}

/* x as the loops above read it: rows, or panels of 16 tokens in which pairs of columns lie together. */
static void lay_out_pairs(const Call *call, const uint16_t *x, int64_t x_row, uint16_t *to) {
    if (call->tokens < panels_from(call)) {
        for (int64_t n = 0; n < call->tokens; n++) memcpy(to + n * call->x_stride, x + n * x_row, 2 * call->columns);
        return;
    }
    for (int64_t token = 0; token < call->tokens; token += LANES) {
        uint16_t *panel = to + token * call->x_stride;
        for (int64_t k = 0; k < call->columns; k += 2 * LANES) {
            __mmask32 there = call->columns - k >= 32 ? ~0u : (1u << (call->columns - k)) - 1;
            vf block[LANES];
            for (int64_t n = 0; n < LANES; n++)
                block[n] = token + n < call->tokens ? (vf)_mm512_maskz_loadu_epi16(there, x + (token + n) * x_row + k) : splat(0);
            transpose(block);
            memcpy(panel + k * LANES, block, sizeof block);
        }
    }
}
#else
#define HAS_PAIRS 0
#endif
