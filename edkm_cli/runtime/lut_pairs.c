/* The product of lut_linear.c for bfloat16 activations, where the processor multiplies pairs of bfloat16 and adds them in float32
 * (AVX-512 BF16): tables are rounded to bfloat16, as the dense weight would be, and 32 entries are looked up by one permute of
 * words.
 *
 * Blocks of 128 columns are decoded in an order of their own (below), in which the activations are laid out once a call. Up to
 * eight tokens, in float16 up to 16, share a decoding in registers; more take panels (lut_linear.c) or, by AMX, tiles (lut_tiles.c).
 */
#include "lut_call.h"

#include <stdlib.h>
#include <time.h>

#if HAS_PAIRS

#define RUN 128         /* columns of a block */
#define RUNS_DEPTH 1024 /* columns after which sums of several tokens start anew: 16 KiB of x, which stay in the L1 cache */
#define FEW_TOKENS 8    /* that share a decoding in registers; in float16 twice as many */
#define MOST_WAYS 4
#define SHORT_ROW 512   /* bytes of indices in a row of one table */
#define SHORT_BLOCKS 32 /* whose tables are prepared at once, where each half of a block has one */
#define BYTE_TOKENS 4   /* from so many on, levels of eight bits are multiplied as pairs */
#define MOST_HALVES 16  /* products in a sum of float16, before it goes to float32 */

/* How blocks are decoded. Codes of at most four bits, by lookups in tables of at most 16 entries: a byte shuffle, so that word
 * j holds the codes of columns 4j to 4j + 3; four shifts, each of which brings one of the four codes of every word to its low
 * bits; four lookups. Vector k of a block holds columns 4j + k; what is above a code's bits chooses a copy of the table. What is
 * left at the end of a row, if at most 64 columns, goes by words of two codes. TILES may end inside a block; FINE: those of
 * 16 or 32 columns, whose tables are looked up together; WHOLE: rows of one table; HALVES: tiles of a multiple of 64 columns, so
 * that half a block has one.
 *
 * Wider codes, and levels of row-scaled matrices: in their order, 64 columns at a time; a byte shuffle brings each qword its
 * eight codes, a multishift each byte its own. Entries of tables are looked up by permutes of words, two registers of them at
 * once and the rest by blends. Levels are small integers, which bfloat16 holds exactly: BYTES makes them of codes of eight
 * bits, those of fewer are a table. WIDE: a table of one vector; WIDE_2, WIDE_4, WIDE_8: of so many. */
#define FOR_LOOKUPS(of) of(TILES) of(FINE) of(WHOLE) of(HALVES)
#define FOR_WIDE(of) of(BYTES) of(WIDE) of(WIDE_2) of(WIDE_4) of(WIDE_8)
#define NUMBER(kind) kind,
enum { FOR_LOOKUPS(NUMBER) FOR_WIDE(NUMBER) KINDS };

/* What decoding codes of a width takes; [1]: in words of two codes. */
typedef struct {
    __m512i spread[2], shift[2][4]; /* bytes to words; what brings code k of a word to its low bits */
    __m512i spread_one, shift_one, levels[4];
    __mmask64 bytes[2]; /* of a block, and of half of it */
    __mmask32 moved[2]; /* words whose first code is not in their low bits already */
} Words;
static Words of_bits[9];
static __m512i order[6], numbers; /* columns 4j + k of 64; 2j and 2j + 1; j */
static uint8_t beside[3][64] __attribute__((aligned(64))); /* bytes of words 1, 2 and 4 apart, in groups of two, four and eight */

INLINE __mmask64 first_bytes(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
INLINE __mmask32 first_words(int64_t count) { return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0; }

#ifdef __AVX512FP16__
#define HAS_HALVES 1
#define IF_HALVES(result) if (half) return (__m512)(result);
#else
#define HAS_HALVES 0
#define IF_HALVES(result) (void)half;
#endif

__attribute__((constructor)) static void prepare_words(void) {
    uint16_t columns[6][32] __attribute__((aligned(64)));
    for (int k = 0; k < 6; k++) {
        for (int j = 0; j < 32; j++) columns[k][j] = (uint16_t)(k < 4 ? (4 * j + k) % 64 : 2 * j + k - 4);
        order[k] = _mm512_load_si512(columns[k]);
    }
    numbers = _mm512_srli_epi16(order[4], 1);
    for (int i = 0; i < 64; i++)
        for (int k = 0, word = i / 2 % 8; k < 3; k++) {
            int apart = 1 << k, at = word % (2 * apart);
            beside[k][i] = (uint8_t)(2 * (word - at + at / 2 + at % 2 * apart) + i % 2);
        }
    for (int bits = 1; bits <= 8; bits++) {
        Words *words = of_bits + bits;
        for (int two = 0; two < 2; two++) {
            uint8_t spread[64] __attribute__((aligned(64)));
            uint16_t shift[4][32] __attribute__((aligned(64)));
            int codes = two ? 2 : 4;
            for (int j = 0; j < 32; j++) {
                int bit = codes * bits * j;
                spread[2 * j] = (uint8_t)(bit / 8);
                spread[2 * j + 1] = (uint8_t)((bit / 8 + 1) & 63);
                for (int k = 0; k < 4; k++) {
                    int by = bit % 8 + bits * k;
                    shift[k][j] = (uint16_t)(HAS_HALVES ? 0x10000 >> by : by);
                }
                if (bit % 8) words->moved[two] |= 1u << j;
            }
            words->spread[two] = _mm512_load_si512(spread);
            for (int k = 0; k < 4; k++) words->shift[two][k] = _mm512_load_si512(shift[k]);
            words->bytes[two] = first_bytes(32 * codes * bits / 8);
        }
        Unpacker bytes;
        prepare(&bytes, bits, NULL);
        words->spread_one = _mm512_load_si512(bytes.window8);
        words->shift_one = _mm512_load_si512(bytes.shift8);
        for (int v = 0; v < 4; v++) { /* repeated where they are fewer than 32 */
            float levels[32] __attribute__((aligned(64)));
            for (int i = 0; i < 32; i++) levels[i] = (float)(((32 * v + i) & ((1 << bits) - 1)) - (1 << (bits - 1)));
            words->levels[v] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(levels + LANES), _mm512_load_ps(levels));
        }
    }
}

/* Code k of every word in its low bits. Where shifts of 512 bits have one port and products two (Intel's processors with
 * products of float16), the upper half of a product is the shift; where products take the port of `vdpbf16ps`, it is not. */
INLINE __m512i codes_of(const Words *u, int codes, int k, __m512i bytes) {
    int two = codes == 2;
    if (!HAS_HALVES) return _mm512_srlv_epi16(bytes, u->shift[two][k]);
    if (k) return _mm512_mulhi_epu16(bytes, u->shift[two][k]);
    return _mm512_mask_mulhi_epu16(bytes, u->moved[two], bytes, u->shift[two][0]);
}

/* Two words in all places. */
INLINE __m512i pair_at(const uint16_t *at) {
    int32_t pair;
    memcpy(&pair, at, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* A table of so many words, repeated until it fills 32 lanes. */
INLINE __m512i repeated(const uint16_t *at, int apart) {
    if (apart == 8) return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)at));
    if (apart == 16) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)at));
    if (apart == 4) return _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)at));
    return pair_at(at);
}

/* 16 entries of a table as words, of which those in `inside` are there. */
INLINE __m256i sixteen_words(const void *lut, int64_t dtype, int64_t at, __mmask16 inside) {
    float entries[LANES] __attribute__((aligned(64))) = {0};
    if (dtype == FLOAT8_E4M3)
        for (int i = 0; i < LANES && inside >> i & 1; i++) entries[i] = e4m3_to_float(((const uint8_t *)lut)[at + i]);
    if (dtype == FLOAT8_E4M3) return (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(entries));
    if (dtype == FLOAT32) return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(inside, (const float *)lut + at));
    __m256i words = _mm256_maskz_loadu_epi16(inside, (const uint16_t *)lut + at);
    return dtype == BFLOAT16 ? words : (__m256i)_mm512_cvtneps_pbh(_mm512_cvtph_ps(words));
}

/* Entries `at` to `at` + 31 as words, of which those in `inside` are there. */
INLINE __m512i many_words(const Part *part, int64_t at, __mmask32 inside) {
    if (part->lut_dtype == BFLOAT16) return _mm512_maskz_loadu_epi16(inside, (const uint16_t *)part->lut + at);
    __m256i high = sixteen_words(part->lut, part->lut_dtype, at + LANES, (__mmask16)(inside >> LANES));
    __m512i low = _mm512_castsi256_si512(sixteen_words(part->lut, part->lut_dtype, at, (__mmask16)inside));
    return _mm512_inserti64x4(low, high, 1);
}

/* The tables of `groups` groups as words, one after the other. */
INLINE void word_tables(const Part *part, int64_t group, int64_t groups, int bits, uint16_t *to) {
    int64_t first = group << bits, last = (group + groups) << bits;
    for (int64_t at = first; at < last; at += LANES, to += LANES)
        _mm256_store_si256((__m256i *)to, sixteen_words(part->lut, part->lut_dtype, at, (__mmask16)first_words(last - at)));
}

/* Those of one group, repeated. */
INLINE __m512i word_table(const Part *part, int64_t group, int bits) {
    if (part->lut_dtype == BFLOAT16) return repeated((const uint16_t *)part->lut + (group << bits), 1 << bits);
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh((__m512)small_table(part->lut, part->lut_dtype, group, bits)));
}

/* Vector k of a block takes lanes whose column, 4j + k (2j + k with `codes` 2), lies in [first, last). */
INLINE __mmask32 lanes_of(int codes, int k, int64_t first, int64_t last) {
    return first_words((last - k + codes - 1) / codes) & ~first_words((first - k + codes - 1) / codes);
}

/* Bytes of a block's `left` codes as words; where they may be read, those behind them, too: a mask costs a load an instruction
 * more. */
INLINE __m512i spread_bytes(const Strip *s, const Words *u, int codes, const uint8_t *p, int64_t left) {
    __mmask64 inside = left < 32 * codes ? first_bytes((left * s->bits + 7) / 8) : u->bytes[codes == 2];
    __m512i bytes = __builtin_expect(p + 64 <= s->limit, 1) ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(inside, p);
    return _mm512_permutexvar_epi8(u->spread[codes == 2], bytes);
}

/* Weights of a block of 128 or, with `codes` 2, of 64 columns, of which `left` are there and lie in one tile or, with `halves`,
 * each half of 64 in one: bit 4 of a lane's number, the half, chooses its table. */
INLINE void decode_run(
    int halves, const Strip *s, const Words *u, int codes, const uint8_t *p, int64_t left, __m512i table, __m512i w[]
) {
    __m512i bytes = spread_bytes(s, u, codes, p, left);
    __m512i upper = _mm512_maskz_set1_epi16(0xffff0000u, 16), code = _mm512_set1_epi16(15);
    for (int k = 0; k < codes; k++) {
        __m512i at = codes_of(u, codes, k, bytes);
        if (halves) at = _mm512_ternarylogic_epi64(at, code, upper, 0xea); /* a & b | c */
        if (left >= 32 * codes) w[k] = _mm512_permutexvar_epi16(at, table);
        else w[k] = _mm512_maskz_permutexvar_epi16(lanes_of(codes, k, 0, left), at, table);
    }
}

/* The same where a block may hold parts of several tiles, whose borders lie between groups of four columns. */
INLINE void decode_tiles(
    const Strip *s, const Words *u, int codes, int64_t row, int64_t column, const uint8_t *p, __m512i w[]
) {
    const Call *call = s->call;
    const Part *part = s->part;
    int64_t end = smaller(column + 32 * codes, call->columns), tile = part->tile_columns;
    __m512i bytes = spread_bytes(s, u, codes, p, end - column);
    for (int k = 0; k < codes; k++) w[k] = _mm512_setzero_si512();
    int64_t group = group_at(call, part, row, column), left = tile - column % tile;
    for (int64_t from = column; from < end; group++, left = tile) {
        int64_t stop = smaller(end, from + left);
        __m512i table = word_table(part, group, call->bits);
        for (int k = 0; k < codes; k++) {
            __m512i at = codes_of(u, codes, k, bytes);
            __mmask32 lanes = lanes_of(codes, k, from - column, stop - column);
            w[k] = _mm512_mask_permutexvar_epi16(w[k], lanes, at, table);
        }
        from = stop;
    }
}

/* The same with tiles of 16 or 32 columns: the tables of a block, up to eight of 16 entries, lie side by side in up to four
 * vectors, and the place of a lane's tile stands above its code. */
INLINE void decode_fine(
    const Strip *s, const Words *u, int codes, int64_t row, int64_t column, int64_t left, const uint8_t *p, __m512i w[]
) {
    int wide = s->part->tile_columns == 32 ? 5 : 4, bits = s->bits, of_lanes = wide - codes / 2; /* logarithms */
    int64_t whole = 32 * codes, there = smaller(left, whole) >> wide << bits;
    int64_t group = tile_of(s->part, row) * (s->call->columns >> wide) + (column >> wide), first = group << bits;
    __m512i bytes = spread_bytes(s, u, codes, p, left);
    __m512i tiles = _mm512_srlv_epi16(numbers, _mm512_set1_epi16(of_lanes)), code = _mm512_set1_epi16((1 << bits) - 1);
    tiles = _mm512_sllv_epi16(tiles, _mm512_set1_epi16(bits));
    __m512i table[4];
    int vectors = (int)((whole >> wide << bits) + 31) / 32;
    for (int v = 0; v < vectors; v++) table[v] = many_words(s->part, first + 32 * v, first_words(there - 32 * v));
    for (int k = 0; k < codes; k++) {
        __m512i at = _mm512_ternarylogic_epi64(codes_of(u, codes, k, bytes), code, tiles, 0xea); /* a & b | c */
        if (vectors == 1) w[k] = _mm512_permutexvar_epi16(at, table[0]);
        else w[k] = _mm512_permutex2var_epi16(table[0], at, table[1]);
        if (vectors == 4) w[k] = _mm512_mask_mov_epi16(w[k], 0xffff0000u, _mm512_permutex2var_epi16(table[2], at, table[3]));
        if (left < whole) w[k] = _mm512_maskz_mov_epi16(lanes_of(codes, k, 0, left), w[k]);
    }
}

/* The tables of a row of tiles, whose widths are multiples of half a block, at most SHORT_BLOCKS blocks of a strip: for each
 * block the tables of both halves, or that of the one half that is left. */
INLINE void tables_of_row(const Strip *s, int64_t row, __m512i tables[]) {
    uint16_t words[SHORT_BLOCKS * 2 * 16] __attribute__((aligned(64)));
    int64_t tile = s->part->tile_columns, left = tile - s->from % tile;
    int64_t groups = (s->end - s->from + tile - left + tile - 1) / tile;
    const uint16_t *at = words;
    int apart = 1 << s->bits;
    word_tables(s->part, group_at(s->call, s->part, row, s->from), groups, s->bits, words);
    for (int64_t from = s->from; from < s->end; from += RUN, tables++) {
        *tables = repeated(at, apart);
        if (!(left -= RUN / 2)) at += apart, left = tile;
        if (s->end - from < RUN) break;
        *tables = _mm512_mask_blend_epi64(0xf0, *tables, repeated(at, apart));
        if (!(left -= RUN / 2)) at += apart, left = tile;
    }
}

/* The entries of a group as words, 32 in a vector. */
INLINE void wide_table(const Part *part, int64_t group, int bits, __m512i table[8]) {
    int64_t at = group << bits;
    for (int v = 0; v < 1 << (bits - 5); v++, at += 32) table[v] = many_words(part, at, ~0u);
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

/* 16 levels as float32. */
INLINE __m512 sixteen(__m128i levels) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(levels)); }

/* 64 weights, or the `left` that are there, by a table of `vectors` or, with 0, levels of eight bits. */
INLINE void decode_wide(
    int vectors, const Words *u, int bits, const uint8_t *p, int64_t left, const __m512i table[8], __m512i w[2]
) {
    __m512i codes = _mm512_maskz_loadu_epi8(left < 64 ? first_bytes((left * bits + 7) / 8) : u->bytes[1], p);
    if (bits != 8) codes = _mm512_multishift_epi64_epi8(u->shift_one, _mm512_permutexvar_epi8(u->spread_one, codes));
    if (!vectors) codes = _mm512_sub_epi8(codes, _mm512_set1_epi8(-128));
    for (int v = 0; v < 2; v++) {
        __m256i half = v ? _mm512_extracti64x4_epi64(codes, 1) : _mm512_castsi512_si256(codes);
        if (vectors) w[v] = wide_entries(table, _mm512_cvtepu8_epi16(half), vectors);
        else w[v] = (__m512i)_mm512_cvtne2ps_pbh(sixteen(_mm256_extracti128_si256(half, 1)), sixteen(_mm256_castsi256_si128(half)));
        if (left < 64) w[v] = _mm512_maskz_mov_epi16(first_words(left - 32 * v), w[v]);
    }
}

/* The tables of a strip's rows: WHOLE those of all rows, prepared together; HALVES those of a row's blocks; wider codes the one
 * of a row. They are made where a row has others than the one before. */
typedef struct {
    __m512i of_row[SHORT_BLOCKS];
    uint16_t words[UNIT * 16] __attribute__((aligned(64)));
    const uint16_t *at;
    int64_t tile_rows, used; /* rows of the current tile that are behind */
    int apart;
} Tables;

INLINE void begin_tables(int kind, Tables *t, const Strip *s) {
    int64_t tile_rows = s->part->tile_rows, first = tile_of(s->part, s->row), last = tile_of(s->part, s->row + s->count - 1);
    t->tile_rows = tile_rows, t->used = s->row - first * tile_rows, t->at = t->words;
    t->apart = 1 << s->bits;
    if (kind == WHOLE) word_tables(s->part, first, last - first + 1, s->bits, t->words);
    if (kind > HALVES && s->call->meaning == LEVEL) memcpy(t->of_row, of_bits[s->bits].levels, sizeof of_bits->levels);
}

/* What blocks of the next rows need, asked for in their order: the table of one (WHOLE), or those in `of_row`. */
INLINE __m512i next_table(int kind, Tables *t, const Strip *s, int64_t row, int rows) {
    __m512i table = kind == WHOLE ? repeated(t->at, t->apart) : _mm512_setzero_si512();
    const int fresh = !t->used || row == s->row;
    if (kind == HALVES && fresh) tables_of_row(s, row, t->of_row);
    if (kind > HALVES && s->call->meaning == LARGE && fresh) wide_table(s->part, tile_of(s->part, row), s->bits, t->of_row);
    if ((t->used += rows) == t->tile_rows) t->used = 0, t->at += kind == WHOLE ? t->apart : 0;
    return table;
}

/* A block, or `left` columns at the end of a strip, half a block (`codes` 2) or more. `table`: that of a row (WHOLE), of the
 * block's halves, or the vectors of a wider one. */
INLINE void decode_block(
    int kind, int codes, const Strip *s, const Words *u, int64_t row, int64_t column, int64_t left, const uint8_t *p,
    const __m512i *table, __m512i w[]
) {
    if (kind == TILES) decode_tiles(s, u, codes, row, column, p, w);
    else if (kind == FINE) decode_fine(s, u, codes, row, column, left, p, w);
    else if (kind <= HALVES) decode_run(kind == HALVES && left >= RUN, s, u, codes, p, left, *table, w);
    else
        for (int v = 0; v < codes; v += 2)
            decode_wide(
                kind >= WIDE ? 1 << (kind - WIDE) : 0, u, s->bits, p + v * 4 * s->bits, left - 32 * v, table, w + v
            );
}

/* How pairs are multiplied: by the processor's products of pairs, or one after the other by float32 FMA, which some processors
 * do four times as often. Both give the same bits, so that it is measured: `choose_multiply`. AMX, where it is, multiplies
 * tiles of 16 rows, 32 columns and 16 tokens, in sums of another order. */
enum { UNKNOWN, PAIRS, ONES, AMX };
static int multiply_by;

INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

/* sum + a b: pairs of bfloat16 in 16 sums of float32 or, with `half`, 32 products and sums of float16. */
INLINE __m512 add_products(int half, __m512 sum, __m512i a, __m512i b) {
    IF_HALVES(_mm512_fmadd_ph((__m512h)a, (__m512h)b, (__m512h)sum))
    return add_pairs(sum, a, b);
}

/* acc[n] += a block of weights times token n; what is left of a row has its lanes of zeros, as x has. */
INLINE void add_run(
    int half, int codes, int tokens, int ways, const __m512i w[], const uint16_t *x, __m512 acc[][MOST_WAYS]
) {
    for (int k = 0; k < codes; k++)
        for (int n = 0; n < tokens; n++)
            acc[n][k % ways] = add_products(half, acc[n][k % ways], w[k], _mm512_load_si512(x + n * RUN + 32 * k));
}

INLINE __m512 both_halves(__m512 sum) {
    __m256i low = _mm512_castsi512_si256((__m512i)sum), high = _mm512_extracti64x4_epi64((__m512i)sum, 1);
    return _mm512_add_ps(_mm512_cvtph_ps(low), _mm512_cvtph_ps(high));
}

INLINE __m512 add_sums(int half, __m512 a, __m512 b) {
    IF_HALVES(_mm512_add_ph((__m512h)a, (__m512h)b))
    return _mm512_add_ps(a, b);
}

/* Adds the sums of one token to `total` in float32, and begins them anew. */
INLINE void flush(int half, int ways, __m512 acc[], vf *total) {
    __m512 sum = acc[0];
    if (ways > 1) sum = add_sums(half, sum, acc[1]);
    if (ways > 2) sum = add_sums(half, sum, add_sums(half, acc[2], acc[3]));
    *total += (vf)(half ? both_halves(sum) : sum);
    for (int v = 0; v < ways; v++) acc[v] = _mm512_setzero_ps();
}

/* sums[n][i]: lane-wise sums of row i of a strip times token n, added to what is there where the strip is not at the beginning
 * of its rows. `rows` at a time, one or, with one token, two: what is loaded of x serves both. HALVES then has tiles an even
 * number of rows high. */
INLINE void few(int half, int kind, int rows, int tokens, const Strip *of, vf sums[][UNIT]) {
    const Strip strip = *of, *s = &strip;
    const Call *call = s->call;
    const Words words = of_bits[s->bits], *u = &words;
    const int ways = kind > HALVES || rows == 2 ? 2 : tokens > 8 ? 1 : tokens == 8 ? 2 : 4; /* sums of a token: additions overlap */
    const int64_t step = RUN * s->bits / 8, in_row = row_bytes(call), left = (s->end - s->from) % RUN, whole = s->end - left;
    const int64_t ahead = s->end - s->from == call->columns ? AHEAD : in_row; /* of a part of a row: that of the next one */
    const uint8_t *first = s->part->indices + s->row * in_row + s->from * s->bits / 8;
    Tables tables;
    begin_tables(kind, &tables, s);
    for (int r = 0; r < s->count; r += rows, first += rows * in_row) {
        const uint8_t *p[2] = {first, r + 1 < s->count ? first + in_row : first}; /* an odd last row twice */
        const uint16_t *at = (const uint16_t *)call->x + s->from * tokens;
        __m512 acc[2 * FEW_TOKENS][MOST_WAYS];
        __m512i w[4], table[2], *of_block = tables.of_row;
        int64_t column = s->from;
        if (kind != WHOLE) next_table(kind, &tables, s, s->row + r, rows);
#pragma GCC unroll 2
        for (int i = 0; i < rows; i++) {
            if (kind == WHOLE) table[i] = next_table(kind, &tables, s, s->row + r + i, 1);
            for (int n = 0; n < tokens; n++) {
                if (!s->from) sums[n][r + i] = splat(0);
                for (int v = 0; v < ways; v++) acc[i * tokens + n][v] = _mm512_setzero_ps();
            }
        }
#define ADD_BLOCK(codes, left)                                                                                        \
    for (int i = 0; i < rows; i++) {                                                                                  \
        decode_block(kind, codes, s, u, s->row + r + i, column, left, p[i], kind == WHOLE ? table + i : of_block, w); \
        add_run(half, codes, tokens, ways, w, at, acc + i * tokens);                                                  \
    }
        for (int64_t block = 1; column < whole; column += RUN, at += RUN * tokens, block++) {
            ADD_BLOCK(4, RUN)
            for (int i = 0; i < rows; i++) p[i] += step, __builtin_prefetch(p[i] + ahead), __builtin_prefetch(p[i] + FAR_AHEAD, 0, 2);
            if (kind == HALVES) of_block++;
            if (half && block % (MOST_HALVES * ways / 4) == 0)
                for (int n = 0; n < rows * tokens; n++) flush(half, ways, acc[n], &sums[n % tokens][r + n / tokens]);
        }
        if (left > RUN / 2) ADD_BLOCK(4, left)
        else if (left) ADD_BLOCK(2, left)
        for (int n = 0; n < rows * tokens; n++) flush(half, ways, acc[n], &sums[n % tokens][r + n / tokens]);
    }
}

/* A function of its own for each number of rows and tokens, so that accumulators get all registers. */
typedef void FewPairs(const Strip *, vf sums[][UNIT]);
#define SOME_OF(half, kind, rows, tokens) \
    NOINLINE few_##half##_##kind##_##rows##_##tokens(const Strip *s, vf sums[][UNIT]) { few(half, kind, rows, tokens, s, sums); }
#define ALL_OF(half, kind) SOME_OF(half, kind, 1, 1) SOME_OF(half, kind, 1, 2) SOME_OF(half, kind, 1, 4) SOME_OF(half, kind, 1, 8)
#define PAIRS_OF(kind) ALL_OF(0, kind)
#define HALVES_OF(kind) ALL_OF(1, kind) SOME_OF(1, kind, 1, 16)
FOR_LOOKUPS(PAIRS_OF) FOR_WIDE(PAIRS_OF) SOME_OF(0, WHOLE, 2, 1) SOME_OF(0, HALVES, 2, 1)
#if HAS_HALVES
FOR_LOOKUPS(HALVES_OF) SOME_OF(1, WHOLE, 2, 1) SOME_OF(1, HALVES, 2, 1)
#endif
/* By the binary logarithm of tokens; the last: two rows, one token. */
enum { TWO_ROWS = 5 };
#define NAME_OF(half, kind, tokens) few_##half##_##kind##_1_##tokens
#define NAMES_OF(half, kind) NAME_OF(half, kind, 1), NAME_OF(half, kind, 2), NAME_OF(half, kind, 4), NAME_OF(half, kind, 8)
#define OF_PAIRS(kind) [kind] = {NAMES_OF(0, kind)},
#define OF_HALVES(kind) [kind] = {NAMES_OF(1, kind), NAME_OF(1, kind, 16)},
static FewPairs *const FEW[][KINDS][TWO_ROWS + 1] = {
    {FOR_LOOKUPS(OF_PAIRS) FOR_WIDE(OF_PAIRS) [WHOLE][TWO_ROWS] = few_0_WHOLE_2_1, [HALVES][TWO_ROWS] = few_0_HALVES_2_1},
#if HAS_HALVES
    {FOR_LOOKUPS(OF_HALVES) [WHOLE][TWO_ROWS] = few_1_WHOLE_2_1, [HALVES][TWO_ROWS] = few_1_HALVES_2_1},
#endif
};

/* The power of two of tokens that the functions above take at once: at least as many as there are. */
INLINE int size_of(int64_t tokens) { return tokens > 1 ? 32 - __builtin_clz((unsigned)tokens - 1) : 0; }

INLINE int kind_of(const Call *call, const Part *part) {
    if (call->meaning != SMALL) return call->meaning == BYTE ? BYTES : call->bits <= 5 ? WIDE : WIDE + call->bits - 5;
    if (part->tile_columns == call->columns) return WHOLE;
    if (part->tile_columns == 16 || part->tile_columns == 32) return FINE;
    return part->tile_columns % (RUN / 2) ? TILES : HALVES;
}

/* Fetch the tables of the rows after [row, row + count): a row has its own and would wait for it. */
INLINE void prefetch_tables(const Call *call, const Part *part, int64_t row, int64_t count) {
    int64_t size = part->lut_dtype == FLOAT32 ? 4 : part->lut_dtype == FLOAT8_E4M3 ? 1 : 2, first = row + count;
    if (call->meaning >= LEVEL || first >= part->rows || kind_of(call, part) == FINE) return; /* FINE: one after the other */
    int64_t last = smaller(first + UNIT, part->rows) - 1, end = group_at(call, part, last, call->columns - 1) + 1;
    for (int64_t at = (group_at(call, part, first, 0) << call->bits) * size; at < (end << call->bits) * size; at += 64)
        __builtin_prefetch((const char *)part->lut + at);
}

/* A strip of whole rows with all tokens. */
static void few_pairs(Strip *s) {
    const Call *call = s->call;
    vf sums[2 * FEW_TOKENS][UNIT];
    int kind = kind_of(call, s->part), size = size_of(call->tokens);
    int64_t depth = size < 3 && kind != TILES && kind != HALVES ? call->columns : RUNS_DEPTH;
    if (size == 0 && kind == WHOLE && row_bytes(call) <= SHORT_ROW) size = TWO_ROWS;
    if (size == 0 && kind == HALVES && s->part->tile_rows % 2 == 0 && call->columns <= SHORT_BLOCKS * RUN) size = TWO_ROWS;
    if (size == TWO_ROWS) depth = call->columns;
    prefetch_tables(call, s->part, s->row, s->count);
    for (s->from = 0; s->from < call->columns; s->from = s->end) {
        s->end = smaller(s->from + depth, call->columns);
        FEW[call->half][kind][size](s, sums);
    }
    for (int n = 0; n < call->tokens; n++) {
        for (int i = s->count; i < UNIT; i++) sums[n][i] = splat(0);
        vf of_rows = sum_lanes(sums[n]);
        finish(call, s->part, s->row, s->count, n, call->half ? of_rows * splat(call->unscale[n]) : of_rows);
    }
}

/* The greatest of `count` words below their signs: the greatest magnitude of numbers of 16 bits. */
INLINE int greatest_word(const void *words, int64_t count) {
    __m512i most = _mm512_setzero_si512(), magnitude = _mm512_set1_epi16(0x7fff);
    for (int64_t i = 0; i < count; i += 32) {
        __m512i part = _mm512_maskz_loadu_epi16(first_words(count - i), (const uint16_t *)words + i);
        most = _mm512_max_epu16(most, _mm512_and_si512(part, magnitude));
    }
    __m512i even = _mm512_and_si512(most, _mm512_set1_epi32(0xffff));
    return _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_srli_epi32(most, 16), even));
}

/* Where the processor multiplies in float16, up to twice FEW_TOKENS tokens with tables of float16 are: entries are not rounded,
 * each token is scaled by a power of two, so that MOST_HALVES products neither overflow nor, beside the greatest ones, get
 * lost, and after so many sums go to float32. 0 where a number is not finite; else the exponents of the scales. */
static int takes_halves(Call *call) {
    int greatest = 0;
    int64_t most_tokens = multiply_by == AMX ? FEW_TOKENS : 2 * FEW_TOKENS;
    if (!HAS_HALVES || call->meaning != SMALL || call->tokens > most_tokens || call->count > MOST_PARTS) return 0;
    for (int64_t p = 0; p < call->count; p++) {
        const Part *part = call->parts + p;
        if (part->lut_dtype != FLOAT16) return 0;
        int found = greatest_word(part->lut, (group_at(call, part, part->rows - 1, call->columns - 1) + 1) << call->bits);
        greatest = found > greatest ? found : greatest;
    }
    for (int64_t n = 0; n < call->tokens; n++) {
        int most = greatest_word((const uint16_t *)call->given + n * call->given_row, call->columns);
        int of_x = (most >> 7) - 127, of_lut = (greatest >> 10) - 15;
        int room = 7 - of_lut < 14 ? 7 - of_lut : 14; /* (2^6 products) 2^(of_lut + 1) 2^(of_x + scale + 1) <= 2^15 */
        if (most >= 0x7f80 || greatest >= 0x7c00 || room - of_x < -126) return 0; /* the last could not be undone */
        call->exponents[n] = room - of_x < 120 ? room - of_x : 120;
    }
    return 1;
}

/* x times 2^exponent in float16. */
INLINE void to_halves(const uint16_t *x, int64_t columns, int exponent, uint16_t *to) {
    __m512 scale = _mm512_set1_ps(ldexpf(1, exponent));
    for (int64_t i = 0; i < columns; i += LANES) {
        __m256i words = _mm256_maskz_loadu_epi16((__mmask16)first_words(columns - i), x + i);
        __m512 values = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
        _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtps_ph(_mm512_mul_ps(values, scale), 0));
    }
}

/* Whether this product goes by pairs: no tile may start inside a group of four columns, and wider codes need whole rows of
 * one table. Few tokens' products with levels of eight bits wait for memory, in float32 as well. */
static int takes_pairs(const Call *call) {
    if (call->out_dtype != BFLOAT16) return 0;
    if (call->meaning >= LEVEL) return call->meaning == LEVEL || call->tokens >= BYTE_TOKENS;
    for (int64_t p = 0; p < call->count; p++) {
        int64_t tile = call->parts[p].tile_columns;
        if (tile != call->columns && (call->meaning == LARGE || tile % 4)) return 0;
    }
    return 1;
}

/* One row of x as blocks are decoded, with zeros up to a whole one; blocks of a row are `apart` words apart. */
INLINE void lay_out_apart(const Call *call, const uint16_t *x, int64_t apart, uint16_t *to) {
    for (int64_t k = 0; k < call->columns; k += RUN, to += apart) {
        __m512i in[4], out[4];
        int64_t left = call->columns - k;
        for (int v = 0; v < 4; v++) in[v] = out[v] = _mm512_maskz_loadu_epi16(first_words(left - 32 * v), x + k + 32 * v);
        if (call->meaning == SMALL && left <= RUN / 2) {
            out[0] = _mm512_permutex2var_epi16(in[0], order[4], in[1]);
            out[1] = _mm512_permutex2var_epi16(in[0], order[5], in[1]);
        }
        for (int v = 0; v < 4 && call->meaning == SMALL && left > RUN / 2; v++) {
            __m512i low = _mm512_permutex2var_epi16(in[0], order[v], in[1]);
            out[v] = _mm512_mask_blend_epi16(0xffff0000u, low, _mm512_permutex2var_epi16(in[2], order[v], in[3]));
        }
        for (int v = 0; v < 4; v++) _mm512_store_si512(to + 32 * v, out[v]);
    }
}

/* A block of a panel: pairs of columns as decoded ones lie beside each other, 4j + k and 4j + 4 + k, each with its 16 tokens. */
static void lay_out_words(const Call *call, int64_t token, int64_t column, void *to) {
    int64_t left = call->columns - column, tokens = call->tokens - token, x_row = call->given_row;
    const uint16_t *from = (const uint16_t *)call->given + token * x_row + column;
    int codes = call->meaning != SMALL ? 1 : left > RUN / 2 ? 4 : 2;
    __m512i pairs = _mm512_load_si512(beside[codes / 2]);
    for (int piece = 0; piece < (codes == 2 ? 2 : 4); piece++) {
        vf block[LANES];
        for (int64_t n = 0; n < LANES; n++) {
            __mmask32 inside = n < tokens ? first_words(left - 32 * piece) : 0;
            block[n] = (vf)_mm512_shuffle_epi8(_mm512_maskz_loadu_epi16(inside, from + n * x_row + 32 * piece), pairs);
        }
        transpose(block);
        for (int j = 0; j < LANES; j++)
            _mm512_store_si512((vf *)to + j % codes * LANES + (piece * LANES + j) / codes, (__m512i)block[j]);
    }
}

/* `count` vectors of 32 weights, as words or, where they are multiplied one by one, as floats: the odd ones first. */
INLINE void put_weights(int fma, int count, const __m512i weights[], Decoded *w, int row, int64_t at) {
    for (int k = 0; k < count; k++, at += 32) {
        if (!fma) _mm512_store_si512(w->words[row] + at, weights[k]);
        if (!fma) continue;
        _mm512_store_si512(w->floats[row] + at, _mm512_and_si512(weights[k], _mm512_set1_epi32((int)0xffff0000)));
        _mm512_store_si512(w->floats[row] + at + LANES, _mm512_slli_epi32(weights[k], 16));
    }
}

/* The rows of a strip; returns the pairs of columns, with those of zeros. */
INLINE int64_t decode_strip(int kind, const Strip *of, Decoded *w) {
    const Strip strip = *of, *s = &strip;
    const int bits = s->bits, fma = multiply_by == ONES;
    const int64_t in_row = row_bytes(s->call), left = (s->end - s->from) % RUN, whole = s->end - s->from - left;
    const Words words = of_bits[bits], *u = &words;
    Tables tables;
    begin_tables(kind, &tables, s);
    for (int r = 0; r < s->count; r++) {
        int64_t row = s->row + r, to = 0;
        const uint8_t *p = s->part->indices + row * in_row + s->from * bits / 8;
        __m512i out[4], own = next_table(kind, &tables, s, row, 1), *table = kind == WHOLE ? &own : tables.of_row;
        for (; to < whole; p += RUN * bits / 8, to += RUN, table += kind == HALVES) {
            decode_block(kind, 4, s, u, row, s->from + to, RUN, p, table, out);
            /* The next strip's, and later ones'; with more tokens multiplying takes longer, and `prefetch_next` does it. */
            for (int line = 0; s->panels <= SUM_TILES && line <= (kind > HALVES) * 64; line += 64)
                __builtin_prefetch(p + UNIT * in_row + line), __builtin_prefetch(p + FAR_AHEAD + line, 0, 2);
            put_weights(fma, 4, out, w, r, to);
        }
        if (left > RUN / 2) {
            decode_block(kind, 4, s, u, row, s->from + to, left, p, table, out);
            put_weights(fma, 4, out, w, r, to);
        } else if (left) {
            decode_block(kind, 2, s, u, row, s->from + to, left, p, table, out);
            put_weights(fma, 2, out, w, r, to);
        }
    }
    return (whole + (left > RUN / 2 ? RUN : left ? RUN / 2 : 0)) / 2;
}

typedef int64_t DecodeStrip(const Strip *, Decoded *);
#define STRIP_OF(kind) \
    static __attribute__((noinline)) int64_t decode_##kind(const Strip *s, Decoded *w) { return decode_strip(kind, s, w); }
FOR_LOOKUPS(STRIP_OF) FOR_WIDE(STRIP_OF)
#define DECODE_NAME(kind) decode_##kind,
static DecodeStrip *const DECODE[KINDS] = {FOR_LOOKUPS(DECODE_NAME) FOR_WIDE(DECODE_NAME)};

static int64_t decode_pairs(const Strip *s, Decoded *w) {
    if (s->from == 0) prefetch_tables(s->call, s->part, s->row, s->count);
    return DECODE[kind_of(s->call, s->part)](s, w);
}

/* Each vector of a panel holds a pair of columns for 16 tokens; a pair of weights is broadcast. A product loads its weights, so
 * that two of them a cycle are the limit of processors with two loads a cycle. `fma` gives the same to the bit: a product of
 * pairs is two FMAs, the odd one first, that take denormal numbers for zero. */
INLINE void add_panels(
    int fma, const Decoded *w, const char *x, int64_t pairs, int64_t apart, int64_t panels, vf sums[][UNIT]
) {
    for (int64_t p = 0; p < panels; p++, x += apart) {
        __m512 acc[UNIT];
        for (int r = 0; r < UNIT; r++) acc[r] = _mm512_setzero_ps();
        for (int64_t i = 0; i < pairs; i++) {
            const float *at = w->floats[0] + i / LANES * 32 + i % LANES;
            __m512i tokens = _mm512_load_si512(x + 64 * i);
            for (int r = 0; !fma && r < UNIT; r++) acc[r] = add_pairs(acc[r], pair_at(w->words[r] + 2 * i), tokens);
            if (!fma) continue;
            __m512 odd = (__m512)_mm512_and_si512(tokens, _mm512_set1_epi32((int)0xffff0000));
            __m512 even = (__m512)_mm512_slli_epi32(tokens, 16);
            for (int r = 0; r < UNIT; r++) acc[r] = _mm512_fmadd_ps(odd, _mm512_set1_ps(at[r * PANEL_ROW]), acc[r]);
            for (int r = 0; r < UNIT; r++) acc[r] = _mm512_fmadd_ps(even, _mm512_set1_ps(at[r * PANEL_ROW + LANES]), acc[r]);
        }
        for (int r = 0; r < UNIT; r++) sums[p][r] += (vf)acc[r];
    }
}

static void add_by_pairs(const Decoded *w, const char *x, int64_t pairs, int64_t apart, int64_t panels, vf sums[][UNIT]) {
    add_panels(0, w, x, pairs, apart, panels, sums);
}

static void add_by_ones(const Decoded *w, const char *x, int64_t pairs, int64_t apart, int64_t panels, vf sums[][UNIT]) {
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    add_panels(1, w, x, pairs, apart, panels, sums);
    _mm_setcsr(before);
}

/* Measured once, in less than a tenth of a millisecond; EDKM_MULTIPLY=pairs or ones says it instead. AMX is not measured: it is
 * taken. */
static void choose_multiply(void) {
    const char *given = getenv("EDKM_MULTIPLY");
    if (multiply_by) return;
    if (given && !strcmp(given, "pairs")) multiply_by = PAIRS;
    if (given && !strcmp(given, "ones")) multiply_by = ONES;
    if (HAS_TILES && !multiply_by && edkm_may_use_tiles()) multiply_by = AMX;
    if (multiply_by) return;
    Decoded w __attribute__((aligned(64)));
    char x[PANEL_DEPTH * LANES * 2] __attribute__((aligned(64)));
    vf sums[1][UNIT] = {};
    int64_t best[2] = {INT64_MAX, INT64_MAX};
    memset(&w, 0, sizeof w), memset(x, 0, sizeof x);
    for (int turn = 0; turn < 16; turn++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        (turn % 2 ? add_by_ones : add_by_pairs)(&w, x, PANEL_DEPTH / 2, 0, 1, sums);
        clock_gettime(CLOCK_MONOTONIC, &end);
        int64_t took = (end.tv_sec - start.tv_sec) * 1000000000 + end.tv_nsec - start.tv_nsec;
        if (took < best[turn % 2]) best[turn % 2] = took;
    }
    __sync_bool_compare_and_swap(&multiply_by, 0, best[1] < best[0] ? ONES : PAIRS); /* the first thread decides */
}

/* x as `few` reads it: block by block that of each token, and zeros for those missing to a power of two. */
static void lay_out_few(const Call *call, void *room) {
    uint16_t *to = room, *halves = to + LANES * call->x_stride;
    int64_t size = 1 << size_of(call->tokens);
    for (int64_t n = 0; n < call->tokens; n++) {
        const uint16_t *x = (const uint16_t *)call->given + n * call->given_row;
        if (call->half) to_halves(x, call->columns, call->exponents[n], halves);
        lay_out_apart(call, call->half ? halves : x, size * RUN, to + n * RUN);
    }
    for (int64_t k = 0; call->tokens < size && k < call->x_stride; k += RUN)
        memset(to + k * size + call->tokens * RUN, 0, (size_t)((size - call->tokens) * RUN) * sizeof *to);
}

int edkm_pairs_take(Call *call, Part parts[MOST_PARTS]) {
    if (!takes_pairs(call)) return 0;
    if (call->tokens > FEW_TOKENS) choose_multiply();
    call->half = takes_halves(call);
    call->few = call->tokens <= (call->half ? 2 * FEW_TOKENS : FEW_TOKENS) ? few_pairs : NULL;
    call->lay_out_few = lay_out_few, call->lay_out = lay_out_words, call->decode = decode_pairs;
    call->add = multiply_by == ONES ? add_by_ones : add_by_pairs;
    if (HAS_TILES && multiply_by == AMX) call->tiled = edkm_tiles_multiply;
    if (!call->half) return 1;
    for (int64_t p = 0; p < call->count; p++) {
        parts[p] = call->parts[p];
        parts[p].lut_dtype = BFLOAT16; /* words are taken as they are */
    }
    for (int64_t n = 0; n < call->tokens; n++) call->unscale[n] = ldexpf(1, -call->exponents[n]);
    call->parts = parts;
    return 1;
}
#endif
