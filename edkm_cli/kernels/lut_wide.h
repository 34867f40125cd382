/* Products of bfloat16 pairs where a code has more than four bits, or is a level of a row-scaled matrix. Included by
 * lut_pairs.h.
 *
 * 64 columns at a time, in their order: a byte shuffle brings each qword its eight codes, a multishift each byte its own.
 * Entries of tables are looked up by permutes of words, two registers of them at once and the rest by blends. Levels are
 * small integers, which bfloat16 holds exactly.
 */
#define WIDE 64       /* columns of a block */
#define WIDE_TOKENS 4 /* from so many on, levels are multiplied as pairs */

/* The entries of a group as words, 32 in a vector. */
INLINE void wide_table(const Part *part, int64_t group, int bits, __m512i table[8]) {
    float entries[MAX_K] __attribute__((aligned(64)));
    load_entries(part->lut, part->lut_dtype, group, bits, entries);
    for (int v = 0; v < 1 << (bits - 5); v++)
        table[v] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(entries + 32 * v + 16), _mm512_load_ps(entries + 32 * v));
}

/* Entries of 32 codes; what is above a code's bits is not looked at. */
INLINE __m512i wide_entries(const __m512i table[8], __m512i codes, int bits) {
    if (bits == 5) return _mm512_permutexvar_epi16(codes, table[0]);
    __m512i found = _mm512_permutex2var_epi16(table[0], codes, table[1]);
    if (bits == 6) return found;
    __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64));
    found = _mm512_mask_blend_epi16(upper, found, _mm512_permutex2var_epi16(table[2], codes, table[3]));
    if (bits == 7) return found;
    __m512i high = _mm512_permutex2var_epi16(table[4], codes, table[5]);
    high = _mm512_mask_blend_epi16(upper, high, _mm512_permutex2var_epi16(table[6], codes, table[7]));
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(128)), found, high);
}

/* Levels 16 * i to 16 * i + 15 as float32. */
INLINE __m512 sixteen(__m128i levels) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(levels)); }

/* Weights of a block, of which `left` columns are there. */
INLINE void decode_wide(
    Meaning meaning, const Words *u, const uint8_t *p, int64_t left, const __m512i table[8], __m512i w[2]
) {
    __m512i codes = _mm512_maskz_loadu_epi8(left < WIDE ? first_bytes((left * u->bits + 7) / 8) : u->bytes_two, p);
    if (meaning != BYTE)
        codes = _mm512_multishift_epi64_epi8(u->shift_one, _mm512_permutexvar_epi8(u->spread_one, codes));
    if (meaning == LARGE) {
        w[0] = wide_entries(table, _mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes)), u->bits);
        w[1] = wide_entries(table, _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(codes, 1)), u->bits);
    } else {
        if (meaning == LEVEL) codes = _mm512_and_si512(codes, _mm512_set1_epi8((char)((1 << u->bits) - 1)));
        codes = _mm512_sub_epi8(codes, _mm512_set1_epi8((char)(1 << (u->bits - 1))));
        __m512 first = sixteen(_mm512_castsi512_si128(codes)), second = sixteen(_mm512_extracti32x4_epi32(codes, 1));
        w[0] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        first = sixteen(_mm512_extracti32x4_epi32(codes, 2)), second = sixteen(_mm512_extracti32x4_epi32(codes, 3));
        w[1] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    }
    for (int v = 0; left < WIDE && v < 2; v++) w[v] = _mm512_maskz_mov_epi16(first_words(left - 32 * v), w[v]);
}

/* As `few_pairs`. */
INLINE void few_wide(
    Meaning meaning, int tokens, const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from,
    int64_t end, const uint16_t *x, vf sums[][UNIT]
) {
    int64_t in_row = row_bytes(call), ahead = end - from == call->columns ? AHEAD : in_row, group = -1;
    const int ways = tokens >= 16 ? 1 : 2;
    __m512i table[8];
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        const uint16_t *at = x + from * tokens;
        __m512 acc[MOST_TOKENS][2];
        __m512i w[2];
        for (int n = 0; n < tokens; n++)
            for (int v = 0; v < ways; v++) acc[n][v] = _mm512_setzero_ps();
        if (meaning == LARGE && group != (row + r) / part->tile_rows)
            wide_table(part, group = (row + r) / part->tile_rows, call->bits, table);
        for (int64_t column = from; column < end; column += WIDE, p += 8 * call->bits, at += WIDE * tokens) {
            __builtin_prefetch(p + ahead);
            decode_wide(meaning, u, p, end - column, table, w);
            for (int k = 0; k < 2; k++)
                for (int n = 0; n < tokens; n++)
                    acc[n][k % ways] = add_pairs(acc[n][k % ways], w[k], _mm512_load_si512(at + n * WIDE + 32 * k));
        }
        for (int n = 0; n < tokens; n++) {
            __m512 sum = ways == 2 ? _mm512_add_ps(acc[n][0], acc[n][1]) : acc[n][0];
            sums[n][r] = from ? sums[n][r] + (vf)sum : (vf)sum;
        }
    }
}

ALL_TOKENS(few_wide, LARGE) ALL_TOKENS(few_wide, LEVEL) ALL_TOKENS(few_wide, BYTE)
static FewPairs *const FEW_WIDE[3][5] = {
    NAMES_BY_TOKENS(few_wide, LARGE), NAMES_BY_TOKENS(few_wide, LEVEL), NAMES_BY_TOKENS(few_wide, BYTE)
};

/* One row of x in blocks, with zeros up to a whole one; blocks are `apart` words apart. */
INLINE void lay_out_wide(const uint16_t *x, int64_t columns, int64_t apart, uint16_t *to) {
    for (int64_t k = 0; k < columns; k += WIDE, to += apart)
        for (int v = 0; v < 2; v++)
            _mm512_store_si512(to + 32 * v, _mm512_maskz_loadu_epi16(first_words(columns - k - 32 * v), x + k + 32 * v));
}
