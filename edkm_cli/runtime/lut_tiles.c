/* Products of many tokens by AMX: tiles of 16 rows and 32 columns of W, decoded to bfloat16, times tiles of 32 columns and 16
 * tokens (a panel), in sums of 16 rows and 16 tokens.
 *
 * Up to four panels have their sums in tiles while a strip of W is decoded part after part and multiplied one part behind, so
 * that decoding and multiplying overlap. With more, 2 x 2 tiles are multiplied at a time: a load serves two products.
 */
#include "lut_call.h"

#if HAS_TILES
#include "threads.h"

#ifndef EDKM_EMULATED_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

int edkm_may_use_tiles(void) {
#ifdef EDKM_EMULATED_AMX
    return 1;
#else
    unsigned a, b, c, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (1u << 22 | 1u << 24))) return 0;
    return !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */);
#endif
}

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;
static const TileConfig ALL_WHOLE = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

typedef vf Sums[UNIT]; /* of 16 rows, each with 16 tokens */

/* Scale, bias, rounding, and a panel's tokens to their rows of y. */
static void finish_sums(const Call *call, const Part *part, int64_t row, int count, int64_t panel, const Sums of) {
    __m512 sums[UNIT];
    __m512i words[8], next[8];
    float factor[UNIT], bias[UNIT] = {0};
    for (int r = 0; r < UNIT; r++) sums[r] = (__m512)of[r];
    if (call->meaning >= LEVEL) {
        memcpy(factor, (const float *)part->lut + row, count * sizeof(float));
        for (int r = 0; r < count; r++) sums[r] *= factor[r];
    }
    if (part->bias) {
        load_run(part->bias, part->bias_dtype, row, count, bias);
        for (int r = 0; r < count; r++) sums[r] += bias[r];
    }
    for (int i = 0; i < 8; i++) words[i] = (__m512i)_mm512_cvtne2ps_pbh(sums[i + 8], sums[i]);
    for (int i = 0; i < 8; i += 2) { /* pairs of rows */
        next[i] = _mm512_unpacklo_epi16(words[i], words[i + 1]);
        next[i + 1] = _mm512_unpackhi_epi16(words[i], words[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) { /* tokens 4j + 0, 1 and 4j + 2, 3 of each half, of four rows */
            words[i + 2 * j] = _mm512_unpacklo_epi32(next[i + j], next[i + 2 + j]);
            words[i + 2 * j + 1] = _mm512_unpackhi_epi32(next[i + j], next[i + 2 + j]);
        }
    int64_t stride = call->out_stride ? call->out_stride : part->rows, first = panel * LANES;
    uint16_t *y = (uint16_t *)call->outs[part - call->parts] + first * stride + row;
    __mmask16 rows = (__mmask16)((1u << count) - 1);
    for (int n = 0; n < 8; n++) { /* tokens n and n + 8 */
        __m512i low = words[n / 2], high = words[4 + n / 2];
        __m512i both = n % 2 ? _mm512_unpackhi_epi64(low, high) : _mm512_unpacklo_epi64(low, high);
        both = _mm512_shuffle_i64x2(both, both, 0xd8);
        if (first + n < call->tokens) _mm256_mask_storeu_epi16(y + n * stride, rows, _mm512_castsi512_si256(both));
        if (first + n + 8 < call->tokens) _mm256_mask_storeu_epi16(y + (n + 8) * stride, rows, _mm512_extracti64x4_epi64(both, 1));
    }
}

#define FOR_TILES(of) of(0) of(1) of(2) of(3)
#define CLEAR(t) _tile_zero(t);
#define STORE(t) if (t < panels) { _tile_stored(t, sums[t], 64); }

/* Up to four panels: sums += a part of a strip times their parts. */
INLINE void add_part(int panels, const Decoded *w, const char *x, int64_t pairs, int64_t apart) {
#define ADD(t)                                        \
    if (t < panels) {                                 \
        _tile_loadd(6, x + t * apart + 1024 * v, 64); \
        _tile_dpbf16ps(t, 7, 6);                      \
    }
    for (int64_t v = 0; v < pairs / LANES; v++) {
        _tile_loadd(7, w->words[0] + 32 * v, sizeof w->words[0]);
        FOR_TILES(ADD)
    }
}

/* A strip with all of its columns: each part is decoded before the one before it is multiplied. */
INLINE void multiply_strip(int panels, Strip *s, Decoded w[2]) {
    const Call *call = s->call;
    Sums sums[SUM_TILES] __attribute__((aligned(64)));
    const char *x = NULL;
    int64_t pairs = 0, apart = 0;
    int part = 0;
    FOR_TILES(CLEAR)
    for (s->from = 0; s->from < call->columns; s->from = s->end, part = !part) {
        s->end = smaller(s->from + call->depth, call->columns);
        int64_t next = call->decode(s, w + part);
        add_part(panels, w + !part, x, pairs, apart);
        x = panel_at(call, s->panel, s->from), pairs = next, apart = apart_at(call, s->from);
    }
    add_part(panels, w + !part, x, pairs, apart);
    FOR_TILES(STORE)
    for (int p = 0; p < panels; p++) finish_sums(call, s->part, s->row, s->count, s->panel + p, sums[p]);
}

/* Two strips, or one, times two panels, or one: sums[2r + p]. What is loaded of x does not drive W from the L1 cache. */
INLINE void multiply_square(
    int rows, int panels, const Decoded *w, const char *x, int64_t pairs, int64_t apart, int fresh, Sums sums[4]
) {
#define LOAD_SUM(t) if (t / 2 < rows && t % 2 < panels) { _tile_loadd(t, sums[t], 64); }
#define STORE_SUM(t) if (t / 2 < rows && t % 2 < panels) { _tile_stored(t, sums[t], 64); }
    if (fresh) { FOR_TILES(CLEAR) } else { FOR_TILES(LOAD_SUM) }
    for (int64_t v = 0; v < pairs / LANES; v++) {
        _tile_loadd(4, w[0].words[0] + 32 * v, sizeof w->words[0]);
        _tile_stream_loadd(6, x + 1024 * v, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (panels > 1) {
            _tile_stream_loadd(7, x + apart + 1024 * v, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (rows > 1) {
            _tile_loadd(5, w[1].words[0] + 32 * v, sizeof w->words[0]);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (rows > 1 && panels > 1) { _tile_dpbf16ps(3, 5, 7); }
    }
    FOR_TILES(STORE_SUM)
}

/* More panels: part after part of the columns, each with two strips after the other. */
static void multiply_squares(Strip *s, Decoded w[2], Sums *all) {
    const Call *call = s->call;
    const int64_t first = s->row, end = s->row + s->count;
    for (s->from = 0; s->from < call->columns; s->from = s->end) {
        s->end = smaller(s->from + call->depth, call->columns);
        const int64_t apart = apart_at(call, s->from);
        const int fresh = !s->from, done = s->end == call->columns;
        for (int64_t row = first; row < end; row += 2 * UNIT) {
            int64_t strips = end - row > UNIT ? 2 : 1, pairs = 0;
            for (int64_t i = 0; i < strips; i++) {
                s->row = row + i * UNIT, s->count = (int)smaller(UNIT, end - s->row);
                pairs = call->decode(s, w + i);
                prefetch_next(s);
            }
            for (int64_t p = 0; p < s->panels; p += 2) {
                const char *x = panel_at(call, s->panel + p, s->from);
                const int64_t panels = smaller(2, s->panels - p);
                Sums *sums = fresh && done ? all : all + ((row - first) / UNIT * TILED_PANELS + 2 * p);
#define SQUARE_IF(r, p) if (strips == r && panels == p) multiply_square(r, p, w, x, pairs, apart, fresh, sums);
                SQUARE_IF(1, 1) SQUARE_IF(1, 2) SQUARE_IF(2, 1) SQUARE_IF(2, 2)
                for (int64_t i = 0; done && i < strips; i++)
                    for (int64_t j = 0, at = row + i * UNIT; j < panels; j++)
                        finish_sums(call, s->part, at, (int)smaller(UNIT, end - at), s->panel + p + j, sums[2 * i + j]);
            }
        }
    }
}

int edkm_tiles_multiply(Strip *s) {
    const int64_t end = s->row + s->count, panels = s->panels;
    Decoded *w = (Decoded *)scratch((2 * sizeof *w + (panels > SUM_TILES) * TILED * TILED_PANELS * sizeof(Sums)) / sizeof(float));
    if (!w) return 0;
    _tile_loadconfig(&ALL_WHOLE);
    if (panels > SUM_TILES) multiply_squares(s, w, (Sums *)(w + 2));
    for (int64_t row = s->row; panels <= SUM_TILES && row < end; row += UNIT) {
        s->row = row, s->count = (int)smaller(UNIT, end - row);
#define STRIP(t) if (panels == t + 1) multiply_strip(t + 1, s, w);
        FOR_TILES(STRIP)
    }
    _tile_release();
    return 1;
}
#endif
