/* Products of bfloat16 pairs where a code has more than four bits, or is a level of a row-scaled matrix. Included by
 * lut_pairs.h.
 *
 * 64 columns at a time, in their order: a byte shuffle brings each qword its eight codes, a multishift each byte its own.
 * Entries of tables are looked up by permutes of words, two registers of them at once and the rest by blends. Levels are
 * small integers, which bfloat16 holds exactly.
 */
#define WIDE 64       /* columns of a block */
#define BYTE_TOKENS 4 /* from so many on, levels of eight bits are multiplied as pairs */

/* The entries of a group as words, 32 in a vector. */
INLINE void wide_table(const Part *part, int64_t group, int bits, __m512i table[8]) {
    const void *lut = part->lut;
    int64_t dtype = part->lut_dtype, first = group << bits;
    float entries[MAX_K] __attribute__((aligned(64)));
    if (dtype == FLOAT8_E4M3) {
        load_entries(lut, dtype, group, bits, entries);
        lut = entries, dtype = FLOAT32, first = 0;
    }
    for (int v = 0; v < 1 << (bits - 5); v++, first += 32) {
        __m256i low = sixteen_words(lut, dtype, first, 0xffff), high = sixteen_words(lut, dtype, first + LANES, 0xffff);
        table[v] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
}

/* Entries of 32 codes from a table of 1, 2, 4 or 8 vectors; what is above a code's bits is not looked at. */
INLINE __m512i wide_entries(const __m512i table[8], __m512i codes, int vectors) {
    if (vectors == 1) return _mm512_permutexvar_epi16(codes, table[0]);
    __m512i found = _mm512_permutex2var_epi16(table[0], codes, table[1]);
    if (vectors == 2) return found;
    __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64));
    found = _mm512_mask_blend_epi16(upper, found, _mm512_permutex2var_epi16(table[2], codes, table[3]));
    if (vectors == 4) return found;
    __m512i high = _mm512_permutex2var_epi16(table[4], codes, table[5]);
    high = _mm512_mask_blend_epi16(upper, high, _mm512_permutex2var_epi16(table[6], codes, table[7]));
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(128)), found, high);
}

/* Levels 16 * i to 16 * i + 15 as float32. */
INLINE __m512 sixteen(__m128i levels) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(levels)); }

/* Weights of a block, of which `left` columns are there, by a table of `vectors` or, with 0, levels of eight bits. */
INLINE void decode_wide(
    int vectors, const Words *u, const uint8_t *p, int64_t left, const __m512i table[8], __m512i w[2]
) {
    __m512i codes = _mm512_maskz_loadu_epi8(left < WIDE ? first_bytes((left * u->bits + 7) / 8) : u->bytes_two, p);
    if (u->bits != 8) codes = _mm512_multishift_epi64_epi8(u->shift_one, _mm512_permutexvar_epi8(u->spread_one, codes));
    if (vectors) {
        w[0] = wide_entries(table, _mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes)), vectors);
        w[1] = wide_entries(table, _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(codes, 1)), vectors);
    } else {
        codes = _mm512_sub_epi8(codes, _mm512_set1_epi8(-128));
        __m512 first = sixteen(_mm512_castsi512_si128(codes)), second = sixteen(_mm512_extracti32x4_epi32(codes, 1));
        w[0] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        first = sixteen(_mm512_extracti32x4_epi32(codes, 2)), second = sixteen(_mm512_extracti32x4_epi32(codes, 3));
        w[1] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    }
    for (int v = 0; left < WIDE && v < 2; v++) w[v] = _mm512_maskz_mov_epi16(first_words(left - 32 * v), w[v]);
}

/* As `few_pairs`. */
INLINE void few_wide(
    int half, int vectors, int tokens, const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from,
    int64_t end, const uint16_t *x, vf sums[][UNIT]
) {
    int64_t in_row = row_bytes(call), ahead = end - from == call->columns ? AHEAD : in_row;
    __m512i table[8];
    (void)half;
    if (call->meaning == LEVEL) memcpy(table, u->levels, sizeof u->levels);
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        const uint16_t *at = x + from * tokens;
        __m512 acc[FEW_TOKENS][2];
        __m512i w[2];
        for (int n = 0; n < tokens; n++)
            for (int v = 0; v < 2; v++) acc[n][v] = _mm512_setzero_ps();
        if (call->meaning == LARGE && (r == 0 || (row + r) % part->tile_rows == 0))
            wide_table(part, (row + r) / part->tile_rows, call->bits, table);
        for (int64_t column = from; column < end; column += WIDE, p += 8 * call->bits, at += WIDE * tokens) {
            __builtin_prefetch(p + ahead);
            decode_wide(vectors, u, p, end - column, table, w);
            for (int k = 0; k < 2; k++)
                for (int n = 0; n < tokens; n++)
                    acc[n][k] = add_pairs(acc[n][k], w[k], _mm512_load_si512(at + n * WIDE + 32 * k));
        }
        for (int n = 0; n < tokens; n++) {
            __m512 sum = _mm512_add_ps(acc[n][0], acc[n][1]);
            sums[n][r] = from ? sums[n][r] + (vf)sum : (vf)sum;
        }
    }
}

/* By the vectors of the table, none, 1, 2, 4 or 8. */
ALL_TOKENS(few_wide, 0, 0) ALL_TOKENS(few_wide, 0, 1) ALL_TOKENS(few_wide, 0, 2) ALL_TOKENS(few_wide, 0, 4) ALL_TOKENS(few_wide, 0, 8)
static FewPairs *const FEW_WIDE[5][4] = {
    {NAMES_BY_TOKENS(few_wide, 0, 0)}, {NAMES_BY_TOKENS(few_wide, 0, 1)}, {NAMES_BY_TOKENS(few_wide, 0, 2)},
    {NAMES_BY_TOKENS(few_wide, 0, 4)}, {NAMES_BY_TOKENS(few_wide, 0, 8)}
};

/* The place of the function for a call in lists as the one above. */
INLINE int kind_of_wide(const Call *call) {
    return call->meaning == BYTE ? 0 : call->bits <= 5 ? 1 : call->bits - 4;
}

/* One row of x in blocks, with zeros up to a whole one; blocks are `apart` words apart. */
INLINE void lay_out_wide(const uint16_t *x, int64_t columns, int64_t apart, uint16_t *to) {
    for (int64_t k = 0; k < columns; k += WIDE, to += apart)
        for (int v = 0; v < 2; v++)
            _mm512_store_si512(to + 32 * v, _mm512_maskz_loadu_epi16(first_words(columns - k - 32 * v), x + k + 32 * v));
}
