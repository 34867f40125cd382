/* Blocks of packed weights as vectors of bfloat16, by lookups in tables of at most 16 entries. Included by lut_pairs.h.
 *
 * 128 columns at a time: byte shuffle, so that word j holds the codes of columns 4j to 4j + 3; four shifts, each of which
 * brings one of the four codes of every word to its low bits; four lookups. What is above a code's bits chooses a copy of
 * the table. What is left at the end of a row, if at most 64 columns, goes by words of two codes.
 */
#define RUN 128         /* columns of a block */
#define SHORT_BLOCKS 32 /* whose tables are prepared at once, where each half of a block has one */

/* Tiles that end inside a block; whole rows of one table; tiles of a multiple of 64 columns, so that half a block has one. */
enum { TILES, WHOLE, HALVES };

/* How blocks are decoded: a shuffle and shifts for words of four codes, the same for words of two, and for bytes of one;
 * levels of up to seven bits as a table, repeated where they are fewer than 32. */
typedef struct {
    __m512i spread, shift[4], spread_two, shift_two[2], spread_one, shift_one, levels[4];
    __mmask64 bytes, bytes_two; /* of a block, and of half of it */
    int bits;
} Words;

INLINE __mmask64 first_bytes(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
INLINE __mmask32 first_words(int64_t count) { return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0; }

INLINE void prepare_levels(Words *words) {
    __m512 values[8];
    for (int v = 0; v < 8; v++) {
        __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512i code = _mm512_add_epi32(_mm512_set1_epi32(LANES * v), lane);
        code = _mm512_and_si512(code, _mm512_set1_epi32((1 << words->bits) - 1));
        values[v] = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(1 << (words->bits - 1))));
    }
    for (int v = 0; v < 4; v++) words->levels[v] = (__m512i)_mm512_cvtne2ps_pbh(values[2 * v + 1], values[2 * v]);
}

INLINE void prepare_words(Words *words, int bits, Meaning meaning) {
    uint8_t spread[2][64] __attribute__((aligned(64)));
    uint16_t shift[6][32] __attribute__((aligned(64)));
    for (int j = 0; j < 32; j++)
        for (int two = 0; two < 2; two++) {
            int codes = two ? 2 : 4, bit = codes * bits * j;
            spread[two][2 * j] = (uint8_t)(bit / 8);
            spread[two][2 * j + 1] = (uint8_t)((bit / 8 + 1) & 63);
            for (int k = 0; k < codes; k++) shift[4 * two + k][j] = (uint16_t)(bit % 8 + bits * k);
        }
    words->spread = _mm512_load_si512(spread[0]);
    words->spread_two = _mm512_load_si512(spread[1]);
    uint8_t one[2][64] __attribute__((aligned(64)));
    for (int i = 0; i < 64; i++) { /* eight codes are `bits` bytes */
        one[0][i] = (uint8_t)((i / 8 * bits + i % 8) & 63);
        one[1][i] = (uint8_t)(i % 8 * bits);
    }
    words->spread_one = _mm512_load_si512(one[0]);
    words->shift_one = _mm512_load_si512(one[1]);
    for (int k = 0; k < 4; k++) words->shift[k] = _mm512_load_si512(shift[k]);
    for (int k = 0; k < 2; k++) words->shift_two[k] = _mm512_load_si512(shift[4 + k]);
    words->bits = bits;
    if (meaning == LEVEL) prepare_levels(words);
    words->bytes = first_bytes(RUN * bits / 8);
    words->bytes_two = first_bytes(RUN / 2 * bits / 8);
}

/* Two words in all places. */
INLINE __m512i pair_at(const uint16_t *at) {
    int32_t pair;
    memcpy(&pair, at, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* A table of `apart` words, repeated until it fills 32 lanes. */
INLINE __m512i repeated(const uint16_t *at, int apart) {
    if (apart == 8) return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)at));
    if (apart == 16) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)at));
    if (apart == 4) return _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)at));
    return pair_at(at);
}

/* Entries of a group as words, repeated until they fill 32 lanes. */
INLINE __m512i word_table(const void *lut, int64_t dtype, int64_t group, int bits) {
    if (dtype == BFLOAT16) return repeated((const uint16_t *)lut + (group << bits), 1 << bits);
    if (dtype == FLOAT16 && bits == 3) {
        __m256 entries = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)lut + group));
        return _mm512_broadcast_i32x4((__m128i)_mm256_cvtneps_pbh(entries));
    }
    __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)small_table(lut, dtype, group, bits));
    return _mm512_broadcast_i64x4(half);
}

/* Vector k of a block takes lanes whose column, 4j + k (2j + k with `codes` 2), lies in [first, last). */
INLINE __mmask32 lanes_of(int codes, int k, int64_t first, int64_t last) {
    return first_words((last - k + codes - 1) / codes) & ~first_words((first - k + codes - 1) / codes);
}

/* Weights of a block of 128 or, with `codes` 2, of 64 columns, of which `left` are there and lie in one tile. */
INLINE void decode_run(const Words *u, int codes, const uint8_t *p, int64_t left, __m512i table, __m512i w[]) {
    int64_t whole = 32 * codes;
    __mmask64 inside = left < whole ? first_bytes((left * u->bits + 7) / 8) : codes == 4 ? u->bytes : u->bytes_two;
    __m512i bytes = _mm512_maskz_loadu_epi8(inside, p);
    bytes = _mm512_permutexvar_epi8(codes == 4 ? u->spread : u->spread_two, bytes);
    for (int k = 0; k < codes; k++) {
        __m512i at = _mm512_srlv_epi16(bytes, codes == 4 ? u->shift[k] : u->shift_two[k]);
        if (left >= whole) w[k] = _mm512_permutexvar_epi16(at, table);
        else w[k] = _mm512_maskz_permutexvar_epi16(lanes_of(codes, k, 0, left), at, table);
    }
}

/* The same where a block may hold parts of several tiles, whose borders lie between groups of four columns. */
INLINE void decode_tiles(
    const Words *u, int codes, const Call *call, const Part *part, int64_t row, int64_t column, const uint8_t *p, __m512i w[]
) {
    int64_t end = smaller(column + 32 * codes, call->columns), tile = part->tile_columns;
    __m512i bytes = _mm512_maskz_loadu_epi8(first_bytes(((end - column) * u->bits + 7) / 8), p);
    bytes = _mm512_permutexvar_epi8(codes == 4 ? u->spread : u->spread_two, bytes);
    for (int k = 0; k < codes; k++) w[k] = _mm512_setzero_si512();
    for (int64_t from = column; from < end;) {
        int64_t stop = smaller(end, (from / tile + 1) * tile);
        __m512i table = word_table(part->lut, part->lut_dtype, group_at(call, part, row, from), call->bits);
        for (int k = 0; k < codes; k++) {
            __m512i at = _mm512_srlv_epi16(bytes, codes == 4 ? u->shift[k] : u->shift_two[k]);
            __mmask32 lanes = lanes_of(codes, k, from - column, stop - column);
            w[k] = _mm512_mask_permutexvar_epi16(w[k], lanes, at, table);
        }
        from = stop;
    }
}

/* 16 entries of a table as words, of which those in `inside` are there. */
INLINE __m256i sixteen_words(const void *lut, int64_t dtype, int64_t at, __mmask16 inside) {
    if (dtype == FLOAT32) return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(inside, (const float *)lut + at));
    __m256i words = _mm256_maskz_loadu_epi16(inside, (const uint16_t *)lut + at);
    return dtype == BFLOAT16 ? words : (__m256i)_mm512_cvtneps_pbh(_mm512_cvtph_ps(words));
}

NOINLINE float8_tables(const Part *part, int64_t group, int64_t groups, int bits, uint16_t *to) {
    for (int64_t i = 0; i < groups; i++)
        _mm512_mask_storeu_epi16(to + 16 * i, 0xffff, word_table(part->lut, part->lut_dtype, group + i, bits));
}

/* The tables of `groups` groups as words, each a number of entries apart that is returned. */
INLINE int word_tables(const Part *part, int64_t group, int64_t groups, int bits, uint16_t *to) {
    int64_t first = group << bits, last = (group + groups) << bits;
    if (part->lut_dtype == FLOAT8_E4M3) {
        float8_tables(part, group, groups, bits, to);
        return 16;
    }
    for (int64_t at = first; at < last; at += LANES, to += LANES)
        _mm256_store_si256((__m256i *)to, sixteen_words(part->lut, part->lut_dtype, at, (__mmask16)first_words(last - at)));
    return 1 << bits;
}

/* The tables of a row of tiles, whose widths are multiples of half a block, from column `from` to `end`, at most SHORT_BLOCKS
 * blocks: for each block the tables of both halves, or that of the one half that is left. */
INLINE void tables_of_row(const Call *call, const Part *part, int64_t row, int64_t from, int64_t end, __m512i tables[]) {
    uint16_t words[SHORT_BLOCKS * 2 * 16] __attribute__((aligned(64)));
    int64_t tile = part->tile_columns, left = tile - from % tile;
    int64_t groups = (end - from + tile - left + tile - 1) / tile;
    int apart = word_tables(part, group_at(call, part, row, from), groups, call->bits, words);
    const uint16_t *at = words;
    for (; from < end; from += RUN, tables++) {
        *tables = repeated(at, apart);
        if (!(left -= RUN / 2)) at += apart, left = tile;
        if (end - from < RUN) break;
        *tables = _mm512_mask_blend_epi64(0xf0, *tables, repeated(at, apart));
        if (!(left -= RUN / 2)) at += apart, left = tile;
    }
}

/* Weights of a whole block whose halves have a table each: bit 4 of a lane's number, the half, chooses it. */
INLINE void decode_halves(const Words *u, const uint8_t *p, __m512i table, __m512i w[]) {
    __m512i bytes = _mm512_permutexvar_epi8(u->spread, _mm512_maskz_loadu_epi8(u->bytes, p));
    __m512i upper = _mm512_maskz_set1_epi16(0xffff0000u, 16), code = _mm512_set1_epi16(15);
    for (int k = 0; k < 4; k++) {
        __m512i at = _mm512_ternarylogic_epi64(_mm512_srlv_epi16(bytes, u->shift[k]), code, upper, 0xea); /* a & b | c */
        w[k] = _mm512_permutexvar_epi16(at, table);
    }
}

/* A block of row `row`, or its first `left` columns; `table`: that of a row, or of the block's halves. */
INLINE void decode_block(
    int tiles, const Words *u, const Call *call, const Part *part, int64_t row, int64_t column, int64_t left, const uint8_t *p,
    __m512i table, __m512i w[]
) {
    int codes = left > RUN / 2 ? 4 : 2;
    if (tiles == TILES) decode_tiles(u, codes, call, part, row, column, p, w);
    else if (tiles == HALVES && left >= RUN) decode_halves(u, p, table, w);
    else if (codes == 4) decode_run(u, 4, p, left, table, w);
    else decode_run(u, 2, p, left, table, w);
}

/* Tables of rows that follow one another, prepared together. */
typedef struct {
    uint16_t words[UNIT * 16] __attribute__((aligned(64)));
    int64_t tile_rows, used; /* rows of the current tile that are behind */
    const uint16_t *at;
    int apart;
} RowTables;

INLINE void prepare_tables(RowTables *tables, const Part *part, int bits, int64_t row, int count) {
    int64_t group = row / part->tile_rows;
    tables->tile_rows = part->tile_rows, tables->used = row % part->tile_rows, tables->at = tables->words;
    tables->apart = word_tables(part, group, (row + count - 1) / part->tile_rows - group + 1, bits, tables->words);
}

/* That of the next row; the last one may be asked for again. */
INLINE __m512i next_table(RowTables *tables, int last) {
    __m512i table = repeated(tables->at, tables->apart);
    if (!last && ++tables->used == tables->tile_rows) tables->at += tables->apart, tables->used = 0;
    return table;
}
