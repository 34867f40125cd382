/* The loops of lut_linear.c for registers of fewer than 16 floats, 16 weights at a time: compilers put sums of 16 lanes into
 * memory there.
 *
 * AVX2: eight b-bit codes are b bytes. Up to four bits, a lane shifts its code out of the 32 bits that all lanes get; wider codes
 * are brought to their lanes by a byte shuffle. A permute looks up eight entries by the low three bits of a code; what is above
 * chooses among permutes of the other entries, or, below three bits, a copy of the table.
 * NEON: 16 codes become bytes, and each looks up the four bytes of its entry in as many tables, which are then interleaved.
 */
#include "lut_call.h"

#if NARROW

#define ROWS 2                /* of W at a time, with up to four tokens */
#define SUMS 6                /* rows of W times 16 tokens whose sums are in registers */
#define READ 24               /* bytes that loads of 16 weights may take */
#define VECTORS (16 / NARROW) /* that 16 weights are */

/* A loop whose bounds are known where it is compiled, so that what it works on stays in registers. */
#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

typedef float vn __attribute__((vector_size(4 * NARROW)));

/* How codes become weights: by tables of 8 (AVX2) or 16 entries, of so many, by gathering, or as levels. */
typedef enum { ONE, TWO, FOUR, GATHERED, SIGNED, SIGNED_BYTES } Kind;

INLINE Kind kind_of(const Call *call) {
    int more = call->bits - (NARROW == 8 ? 3 : 4);
    if (call->meaning >= LEVEL) return call->meaning == BYTE ? SIGNED_BYTES : SIGNED;
    return more <= 0 ? ONE : more == 1 ? TWO : more == 2 ? FOUR : GATHERED;
}

#if NARROW == 8

typedef struct {
    __m256i window, shift, mask;
    int bits;
} Codes;

typedef struct {
    __m256 small[4];
    float large[MAX_K] __attribute__((aligned(32)));
} Entries;

static Codes codes_of(const Call *call) {
    uint8_t window[32];
    int32_t shift[8];
    int bits = call->bits;
    for (int i = 0; i < 8; i++) {
        shift[i] = kind_of(call) <= TWO ? i * bits : i * bits % 8;
        for (int byte = 0; byte < 4; byte++) window[4 * i + byte] = byte < 2 ? (uint8_t)(i * bits / 8 + byte) : 0x80;
    }
    return (Codes){_mm256_loadu_si256((const __m256i *)window), _mm256_loadu_si256((const __m256i *)shift),
                   _mm256_set1_epi32((1 << bits) - 1), bits};
}

/* Eight entries of 16 bits without memory, as in small_table; whether there are such. */
INLINE int use_eight(const Part *part, int64_t group, int bits, int rounds, Entries *to) {
    if (bits != 3 || part->lut_dtype != FLOAT16) return 0;
    __m256 entries = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)part->lut + (group << 3))));
    __m256i word = _mm256_castps_si256(entries), odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
    word = _mm256_add_epi32(word, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))); /* as round_entries */
    word = _mm256_and_si256(word, _mm256_set1_epi32((int)0xffff0000));
    to->small[0] = rounds ? _mm256_castsi256_ps(word) : entries;
    return 1;
}

INLINE void to_registers(Kind kind, int bits, Entries *to) {
    for (int j = 1 << bits; j < 8; j++) to->large[j] = to->large[j - (1 << bits)];
    for (int v = 0; kind <= FOUR && v < 1 << kind; v++) to->small[v] = _mm256_load_ps(to->large + 8 * v);
}

INLINE __m256 of_two(const __m256 *entries, __m256i codes) { /* bit 3 is moved to the sign, where blendv looks */
    return _mm256_blendv_ps(
        _mm256_permutevar8x32_ps(entries[0], codes), _mm256_permutevar8x32_ps(entries[1], codes),
        _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28))
    );
}

INLINE __m256 eight(Kind kind, const Codes *c, const Entries *entries, const uint8_t *p) {
    __m256i codes;
    if (kind <= TWO) {
        int32_t all;
        memcpy(&all, p, sizeof all);
        codes = _mm256_srlv_epi32(_mm256_set1_epi32(all), c->shift);
        return kind == ONE ? _mm256_permutevar8x32_ps(entries->small[0], codes) : of_two(entries->small, codes);
    }
    if (kind == SIGNED_BYTES) {
        __m128i bytes = _mm_xor_si128(_mm_loadl_epi64((const __m128i *)p), _mm_set1_epi8((char)0x80));
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
    codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)), c->window);
    codes = _mm256_srlv_epi32(codes, c->shift);
    if (kind == FOUR)
        return _mm256_blendv_ps(
            of_two(entries->small, codes), of_two(entries->small + 2, codes), _mm256_castsi256_ps(_mm256_slli_epi32(codes, 27))
        );
    codes = _mm256_and_si256(codes, c->mask);
    if (kind == GATHERED) return _mm256_i32gather_ps(entries->large, codes, 4);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(1 << (c->bits - 1))));
}

/* Sixteen weights from byte `p` on, levels unscaled. */
INLINE void sixteen(Kind kind, const Codes *c, const Entries *entries, const uint8_t *p, vn w[VECTORS]) {
    w[0] = (vn)eight(kind, c, entries, p), w[1] = (vn)eight(kind, c, entries, p + c->bits);
}

INLINE float sum_of(vn x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}

#else

typedef struct {
    uint8x16_t window[2], mask;
    int16x8_t shift[2];
    int bits;
} Codes;

typedef struct {
    uint8x16x4_t bytes[4]; /* first, second, third, fourth of the entries, 16 a register */
    float large[MAX_K] __attribute__((aligned(64)));
} Entries;

static Codes codes_of(const Call *call) {
    Codes c = {.mask = vdupq_n_u8((uint8_t)((1 << call->bits) - 1)), .bits = call->bits};
    for (int i = 0; i < 16; i++) {
        int bit = i * call->bits;
        c.window[i / 8][2 * (i % 8)] = (uint8_t)(bit / 8), c.window[i / 8][2 * (i % 8) + 1] = (uint8_t)(bit / 8 + 1);
        c.shift[i / 8][i % 8] = (int16_t)-(bit % 8);
    }
    return c;
}

INLINE void to_registers(Kind kind, int bits, Entries *to) {
    for (int v = 0; kind <= FOUR && v < 1 << kind; v++) {
        uint8x16x4_t parted = vld4q_u8((const uint8_t *)(to->large + 16 * v));
        for (int byte = 0; byte < 4; byte++) to->bytes[byte].val[v] = parted.val[byte];
    }
}

INLINE uint8x16_t bytes_at(Kind kind, uint8x16x4_t table, uint8x16_t codes) {
    if (kind == ONE) return vqtbl1q_u8(table.val[0], codes);
    if (kind == FOUR) return vqtbl4q_u8(table, codes);
    uint8x16x2_t half = {{table.val[0], table.val[1]}};
    return vqtbl2q_u8(half, codes);
}

/* Sixteen weights from byte `p` on, levels unscaled. */
INLINE void sixteen(Kind kind, const Codes *c, const Entries *entries, const uint8_t *p, vn w[VECTORS]) {
    uint8x16_t codes = vld1q_u8(p);
    if (kind != SIGNED_BYTES) {
        uint16x8_t low = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(codes, c->window[0])), c->shift[0]);
        uint16x8_t high = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(codes, c->window[1])), c->shift[1]);
        codes = vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), c->mask);
    }
    if (kind >= SIGNED) {
        int8x16_t levels = vreinterpretq_s8_u8(vsubq_u8(codes, vdupq_n_u8((uint8_t)(1 << (c->bits - 1)))));
        int16x8_t half[] = {vmovl_s8(vget_low_s8(levels)), vmovl_high_s8(levels)};
        for (int v = 0; v < VECTORS; v++)
            w[v] = vcvtq_f32_s32(v % 2 ? vmovl_high_s16(half[v / 2]) : vmovl_s16(vget_low_s16(half[v / 2])));
    } else if (kind == GATHERED) {
        const float *of = entries->large;
        for (int v = 0, i = 0; v < VECTORS; v++, i += 4)
            w[v] = (vn){of[codes[i]], of[codes[i + 1]], of[codes[i + 2]], of[codes[i + 3]]};
    } else {
        uint8x16_t byte[4];
        for (int b = 0; b < 4; b++) byte[b] = bytes_at(kind, entries->bytes[b], codes);
        uint16x8_t low[] = {vreinterpretq_u16_u8(vzip1q_u8(byte[0], byte[1])), vreinterpretq_u16_u8(vzip2q_u8(byte[0], byte[1]))};
        uint16x8_t high[] = {vreinterpretq_u16_u8(vzip1q_u8(byte[2], byte[3])), vreinterpretq_u16_u8(vzip2q_u8(byte[2], byte[3]))};
        for (int v = 0; v < VECTORS; v++)
            w[v] = (vn)(v % 2 ? vzip2q_u16(low[v / 2], high[v / 2]) : vzip1q_u16(low[v / 2], high[v / 2]));
    }
}

INLINE float sum_of(vn x) { return vaddvq_f32(x); }

#endif

INLINE void use_entries(Kind kind, const Strip *s, int64_t group, Entries *to) {
    const Part *part = s->part;
    if (kind >= SIGNED) return;
    int rounds = s->call->out_dtype == BFLOAT16;
#if NARROW == 8
    if (kind == ONE && use_eight(part, group, s->bits, rounds, to)) return;
#endif
    load_entries(part->lut, part->lut_dtype, group, s->bits, to->large);
    if (rounds) round_entries(to->large, 1 << s->bits);
    to_registers(kind, s->bits, to);
}

/* Of `steps` of 16 weights from byte `p` on, those that may be loaded where they are; the others are at the end of the matrix. */
INLINE int64_t readable_steps(const Strip *s, const uint8_t *p, int64_t steps) {
    int64_t left = s->limit - p - READ;
    return left < 0 ? 0 : smaller(steps, left / (2 * s->bits) + 1);
}

INLINE const uint8_t *copied(const Strip *s, const uint8_t *p, uint8_t copy[READ]) {
    memset(copy, 0, READ);
    memcpy(copy, p, (size_t)smaller(READ, s->limit - p));
    return copy;
}

INLINE void decode_row(Kind kind, const Strip *s, int64_t row, float *to) {
    const Codes codes = codes_of(s->call), *c = &codes;
    const uint8_t *bytes = s->part->indices + row * row_bytes(s->call), *p;
    uint8_t copy[READ];
    Entries entries;
    int64_t group = group_at(s->call, s->part, row, s->from);
    for (int64_t from = s->from, stop; from < s->end; from = stop) {
        stop = smaller(s->end, (from / s->part->tile_columns + 1) * s->part->tile_columns);
        use_entries(kind, s, group++, &entries);
        p = bytes + from * s->bits / 8;
        int64_t steps = (stop - from + 15) / 16, quick = readable_steps(s, p, steps);
        for (int64_t i = 0; i < steps; i++, p += 2 * s->bits) {
            vn w[VECTORS];
            sixteen(kind, c, &entries, __builtin_expect(i < quick, 1) ? p : copied(s, p, copy), w);
            EACH(v, VECTORS) memcpy(to + 16 * i + NARROW * v, w + v, sizeof *w); /* one of all goes through memory */
        }
        to += stop - from;
    }
}

/* acc[r][n] += 16 weights of each row times those of x; one token's sums are in as many vectors as there are. */
INLINE void add_sixteen(
    Kind kind, int tokens, const Codes *c, const Entries *entries, const uint8_t *const p[ROWS], int64_t at,
    const float *x, int64_t stride, vn acc[ROWS][4][VECTORS]
) {
    EACH(r, ROWS) {
        vn w[VECTORS];
        sixteen(kind, c, entries + r, p[r] + at, w);
        EACH(v, VECTORS)
            EACH(n, tokens)
                acc[r][n][v % (tokens == 1 ? VECTORS : VECTORS / 2)] += w[v] * *(const vn *)(x + n * stride + NARROW * v);
    }
}

/* Every 512 columns, or tile, sums of several tokens start anew, which keeps rounding errors small; one token's are in twice as
 * many. */
INLINE void add_up(int tokens, vn acc[ROWS][4][VECTORS], vn sums[ROWS][4]) {
    EACH(r, ROWS)
        EACH(n, tokens)
            EACH(v, VECTORS) sums[r][n] += acc[r][n][v], acc[r][n][v] = (vn){};
}

/* y[n][r] = row r of a strip times token n, for all its rows and up to four tokens; x is padded with zeros. */
INLINE void few(Kind kind, int tokens, const Strip *s, const float *x, vf y[]) {
    const Call *call = s->call;
    const Codes codes = codes_of(call), *c = &codes;
    int64_t tile = s->part->tile_columns, stride = call->x_stride, size = row_bytes(call), bits = s->bits;
    Entries entries[ROWS];
    uint8_t copy[ROWS][READ];
    for (int first = 0; first < s->count; first += ROWS) {
        vn acc[ROWS][4][VECTORS] = {}, sums[ROWS][4] = {};
        int64_t rows[ROWS], groups[ROWS];
        for (int r = 0; r < ROWS; r++) {
            rows[r] = s->row + smaller(first + r, s->count - 1);
            groups[r] = group_at(call, s->part, rows[r], 0);
        }
        for (int64_t from = 0; from < call->columns; from += tile) {
            const uint8_t *p[ROWS], *ends[ROWS];
            const float *at = x + from;
            for (int r = 0; r < ROWS; r++) {
                p[r] = s->part->indices + rows[r] * size + from * bits / 8;
                use_entries(kind, s, groups[r]++, entries + r);
            }
            int64_t steps = (tile + 15) / 16, quick = readable_steps(s, p[ROWS - 1], steps), i = 0;
            for (; i < quick; i++) {
                add_sixteen(kind, tokens, c, entries, p, 2 * i * bits, at + 16 * i, stride, acc);
                if (tokens > 1 && i % 32 == 31) add_up(tokens, acc, sums);
            }
            for (; i < steps; i++) {
                for (int r = 0; r < ROWS; r++) ends[r] = copied(s, p[r] + 2 * i * bits, copy[r]);
                add_sixteen(kind, tokens, c, entries, ends, 0, at + 16 * i, stride, acc);
            }
        }
        add_up(tokens, acc, sums);
        for (int r = 0; r < ROWS && first + r < s->count; r++)
            for (int n = 0; n < tokens; n++) y[n][first + r] = sum_of(sums[r][n]);
    }
}

#define FOR_KINDS(of) of(ONE) of(TWO) of(FOUR) of(GATHERED) of(SIGNED) of(SIGNED_BYTES)
FOR_KINDS(DECODE_OF) FOR_KINDS(FEW_OF)

void edkm_narrow_decode(const Strip *s, int64_t row, float *to) {
#define DECODE_NAME(kind) decode_##kind,
    static Decode *const DECODE[] = {FOR_KINDS(DECODE_NAME)};
    DECODE[kind_of(s->call)](s, row, to);
}

void edkm_narrow_few(const Strip *s, int tokens, const float *x, vf y[4]) {
#define NAMES_OF(kind) FEW_NAMES(kind),
    static Few *const FEW[][4] = {FOR_KINDS(NAMES_OF)};
    FEW[kind_of(s->call)][tokens - 1](s, x, y);
}

/* sums[r] += `rows` rows of W times 16 tokens; every 64 columns a sum starts anew, as in add_floats. */
INLINE void add_rows(int rows, const float *w, const float *x, int64_t vectors, float *sums) {
    for (int64_t from = 0; from < vectors; from += 64) {
        vn acc[SUMS][VECTORS] = {};
        for (int64_t k = from; k < smaller(from + 64, vectors); k++) {
            vn part[VECTORS];
            EACH(v, VECTORS) part[v] = *(const vn *)(x + LANES * k + NARROW * v);
            EACH(r, rows) {
                vn one = w[r * PANEL_ROW + k] - (vn){};
                EACH(v, VECTORS) acc[r][v] += one * part[v];
            }
        }
        EACH(r, rows)
            EACH(v, VECTORS) *(vn *)(sums + LANES * r + NARROW * v) += acc[r][v];
    }
}

void edkm_narrow_add(const Decoded *w, const char *x, int64_t vectors, int64_t apart, int64_t panels, vf sums[][UNIT]) {
    for (int64_t p = 0; p < panels; p++, x += apart) {
        int row = 0;
        for (; row + SUMS <= UNIT; row += SUMS) add_rows(SUMS, w->floats[row], (const float *)x, vectors, (float *)&sums[p][row]);
        add_rows(UNIT % SUMS, w->floats[row], (const float *)x, vectors, (float *)&sums[p][row]);
    }
}

#endif
