/* y = x W^T + b with W packed: b-bit indices into tables, or signed levels with one scale a row. W is never written out.
 *
 * Few rows of x: each row of W is decoded in registers and multiplied with up to four rows of x at once. More rows, and where tiles
 * cut vectors: 16 rows of W at a time are decoded into the L1 cache, up to 256 columns of them, and multiplied with panels of 16 rows of x,
 * which lie column by column, so that a lane is a row of x and nothing has to be summed across lanes.
 *
 * Sums are float32 in an order that depends on shapes only, so that the number of threads changes no result.
 */
#include "lut_call.h"
#include "threads.h"

#define DEPTH 512        /* columns of a row that are decoded at a time for `edkm_packed_rows` */
#define SHARED_PANELS 64 /* panels of x that share a decoding */
#ifdef __AVX512F__
#define TOGETHER UNIT /* rows whose sums are in registers */
#else
#define TOGETHER 4
#endif
#define SHARED_PRODUCTS (1 << 17) /* from so many on, other threads help: below, waking them costs more */
#define SHARED_WEIGHTS (1 << 15)  /* the same for decoding */

/* Weights of a strip's columns in one row, levels unscaled; may write up to 15 floats more. */
INLINE void decode_row(Meaning meaning, const Strip *s, int64_t row, float *to) {
    const Call *call = s->call;
    const Part *part = s->part;
    const uint8_t *bytes = part->indices + row * row_bytes(call);
    int64_t step = call->bits;
    int whole = whole_bytes(call, part);
    int64_t group = group_at(call, part, row, s->from);
    for (int64_t from = s->from; from < s->end; group++) {
        int64_t stop = smaller(s->end, (from / part->tile_columns + 1) * part->tile_columns), i = from;
        use_table(meaning, s->table, part->lut, part->lut_dtype, call->out_dtype, group, call->bits);
        if (whole) {
            const uint8_t *p = bytes + from * step / 8;
            vf w[4];
            for (; i + 64 <= stop; i += 64, p += 8 * step) {
                weights64(meaning, s->u, s->table, p, w);
                for (int v = 0; v < 4; v++) put(to + i - from + v * LANES, w[v]);
            }
            for (; i < stop; i += LANES, p += 2 * step) put(to + i - from, weights16(meaning, s->u, s->table, p));
        } else {
            for (; i < stop; i++) {
                int code = code_at(bytes, i, call->bits), level = code - (1 << (call->bits - 1));
                to[i - from] = meaning == SMALL ? s->table->small[code] : meaning == LARGE ? s->table->large[code] : level;
            }
        }
        to += stop - from;
        from = stop;
    }
}

#if !NARROW
/* y[n]: all rows of a strip times token n, for up to four tokens; x is padded with zeros to whole vectors. */
INLINE void few(Meaning meaning, int tokens, const Strip *s, const float *x, vf y[]) {
    const Call *call = s->call;
    const Part *part = s->part;
    const Unpacker *u = s->u;
    Table *table = s->table;
    int64_t step = call->bits, stride = call->x_stride, tile = part->tile_columns;
    vf sums[4][UNIT] = {};
    for (int r = 0; r < s->count; r++) {
        const uint8_t *bytes = part->indices + (s->row + r) * row_bytes(call);
        vf acc[4][4] = {}, w[4];
        int64_t group = group_at(call, part, s->row + r, 0);
        for (int64_t from = 0; from < call->columns; from += tile, group++) {
            const uint8_t *p = bytes + from * step / 8;
            const float *at = x + from, *stop = at + tile;
            use_table(meaning, table, part->lut, part->lut_dtype, call->out_dtype, group, call->bits);
            for (; at + 64 <= stop; at += 64, p += 8 * step) {
                __builtin_prefetch(p + AHEAD);
                weights64(meaning, u, table, p, w);
                for (int n = 0; n < tokens; n++)
                    for (int v = 0; v < 4; v++) acc[n][v] += w[v] * load_x(at + n * stride + v * LANES);
            }
            for (; at < stop; at += LANES, p += 2 * step) {
                w[0] = weights16(meaning, u, table, p);
                for (int n = 0; n < tokens; n++) acc[n][0] += w[0] * load_x(at + n * stride);
            }
        }
        for (int n = 0; n < tokens; n++) sums[n][r] = (acc[n][0] + acc[n][1]) + (acc[n][2] + acc[n][3]);
    }
    for (int n = 0; n < tokens; n++) y[n] = sum_lanes(sums[n]);
}

FEW_OF(SMALL) FEW_OF(LARGE) FEW_OF(LEVEL) FEW_OF(BYTE)
static Few *const FEW[][4] = {FEW_NAMES(SMALL), FEW_NAMES(LARGE), FEW_NAMES(LEVEL), FEW_NAMES(BYTE)};
#endif

DECODE_OF(SMALL) DECODE_OF(LARGE) DECODE_OF(LEVEL) DECODE_OF(BYTE)
static Decode *const DECODE[] = {decode_SMALL, decode_LARGE, decode_LEVEL, decode_BYTE};

static void decode(const Strip *s, int64_t row, float *to) {
    if (NARROW && whole_bytes(s->call, s->part)) return edkm_narrow_decode(s, row, to);
    DECODE[s->call->meaning](s, row, to);
}

/* A strip with all tokens, up to four at a time. */
static void few_floats(Strip *s) {
    const Call *call = s->call;
    for (int64_t token = 0; token < call->tokens; token += 4) {
        vf y[4];
        int tokens = (int)smaller(4, call->tokens - token);
        const float *x = (const float *)call->x + token * call->x_stride;
#if NARROW
        edkm_narrow_few(s, tokens, x, y);
#else
        FEW[call->meaning][tokens - 1](s, x, y);
#endif
        for (int n = 0; n < tokens; n++) finish(call, s->part, s->row, s->count, token + n, y[n]);
    }
}

static int64_t decode_floats(const Strip *s, Decoded *w) {
    for (int r = 0; r < s->count; r++) decode(s, s->row + r, w->floats[r]);
    return s->end - s->from;
}

/* Every 64 columns a sum starts anew, which keeps rounding errors as small as those of sums over lanes. */
static void add_floats(const Decoded *w, const char *x, int64_t vectors, int64_t apart, int64_t panels, vf sums[][UNIT]) {
    for (int64_t p = 0; p < panels; p++, x += apart)
        for (int first = 0; first < UNIT; first += TOGETHER)
            for (int64_t from = 0; from < vectors; from += 64) {
                vf acc[TOGETHER] = {};
                for (int64_t k = from; k < smaller(from + 64, vectors); k++) {
                    vf tokens = load_x((const float *)x + k * LANES);
                    for (int r = 0; r < TOGETHER; r++) acc[r] += splat(w->floats[first + r][k]) * tokens;
                }
                for (int r = 0; r < TOGETHER; r++) sums[p][first + r] += acc[r];
            }
}

/* Each token filled up with zeros. */
static void lay_out_rows(const Call *call, void *room) {
    float *to = room;
    for (int64_t n = 0; n < call->tokens; n++, to += call->x_stride) {
        load_run(call->given, call->out_dtype, n * call->given_row, call->columns, to);
        memset(to + call->columns, 0, (call->x_stride - call->columns) * sizeof(float));
    }
}

static void lay_out_floats(const Call *call, int64_t token, int64_t column, void *to) {
    int64_t tokens = smaller(LANES, call->tokens - token);
    for (int64_t end = column + 128; column < end; column += LANES, to = (char *)to + LANES * sizeof(vf)) {
        vf block[LANES] = {};
        for (int64_t n = 0; n < tokens && column < call->columns; n++) {
            int64_t at = (token + n) * call->given_row + column, count = smaller(LANES, call->columns - column);
            load_run(call->given, call->out_dtype, at, count, (float *)(block + n));
        }
        transpose(block);
        memcpy(to, block, sizeof block);
    }
}

/* How many columns are decoded at a time: equal parts, of whole blocks. How many panels share a decoding: equal groups, too. */
static void divide(Call *call) {
    int64_t panels = panels_of(call), all = panels <= 2 && call->columns <= TILED_DEPTH;
    int64_t most = call->tiled && (panels > SUM_TILES || all) ? TILED_DEPTH : PANEL_DEPTH;
    int64_t parts = (call->columns + most - 1) / most, together = call->tiled ? TILED_PANELS : SHARED_PANELS;
    int64_t groups = (panels + together - 1) / together;
    call->depth = ((call->columns + parts - 1) / parts + 127) / 128 * 128;
    call->group = ((panels + groups - 1) / groups + 1) / 2 * 2;
}

/* A strip of whole rows with a group of panels. */
static void many_tokens(Strip *s) {
    const Call *call = s->call;
    Decoded w __attribute__((aligned(64)));
    vf sums[SHARED_PANELS][UNIT];
    memset(sums, 0, s->panels * sizeof *sums);
    if (s->count < UNIT) memset(&w, 0, sizeof w);
    for (s->from = 0; s->from < call->columns; s->from = s->end) {
        s->end = smaller(s->from + call->depth, call->columns);
        int64_t vectors = call->decode(s, &w);
        prefetch_next(s);
        call->add(&w, panel_at(call, s->panel, s->from), vectors, apart_at(call, s->from), s->panels, sums);
    }
    for (int64_t p = 0; p < s->panels; p++) {
        transpose(sums[p]);
        for (int64_t n = 0, at = (s->panel + p) * LANES; n < smaller(LANES, call->tokens - at); n++)
            finish(call, s->part, s->row, s->count, at + n, sums[p][n]);
    }
}

/* Units [first, last) of all parts, one after the other, with one group of panels. */
static void multiply_parts(const Call *call, int64_t panel, int64_t first, int64_t last) {
    for (int64_t p = 0, before = 0; p < call->count; p++) {
        const Part *part = call->parts + p;
        int64_t own = (part->rows + UNIT - 1) / UNIT, start = first > before ? first - before : 0;
        int64_t stop = smaller(own, last - before);
        Unpacker u;
        Table table;
        Strip s = {.call = call, .part = part, .u = &u, .table = &table, .end = call->columns, .bits = call->bits};
        before += own;
        if (start >= stop) continue;
        s.limit = part->indices + part->rows * row_bytes(call);
        s.panel = panel, s.panels = smaller(call->group, panels_of(call) - panel);
        table.group = -1;
        if (!call->pairs) prepare(&u, call->bits, s.limit);
        for (int64_t i = start, next; i < stop; i = next) {
            next = call->few || !call->tiled ? i + 1 : smaller(i + TILED, stop);
            s.row = i * UNIT, s.count = (int)(smaller(next * UNIT, part->rows) - s.row);
            if (call->few) call->few(&s);
            else if (!call->tiled) many_tokens(&s);
            else if (!call->tiled(&s)) *call->short_of_memory = 1;
        }
    }
}

/* Units of the first group of panels, then those of the second: threads find what they laid out in their own caches. */
static void multiply_units(const void *job, int64_t first, int64_t last) {
    const Call *call = job;
    for (int64_t at = first, end; at < last; at = end) {
        int64_t group = at / call->units, before = group * call->units;
        end = smaller(last, before + call->units);
        multiply_parts(call, group * call->group, at - before, end - before);
    }
}

/* Blocks [first, last) of 128 columns of panels of 16 tokens, each vector of four bytes of them. */
static void lay_out_blocks(const void *job, int64_t first, int64_t last) {
    const Call *call = job;
    int64_t across = call->x_stride / 128;
    for (int64_t i = first; i < last; i++) {
        int64_t panel = i / across, column = i % across * 128, from = column / call->depth * call->depth;
        char *to = panel_at(call, panel, from) + (column - from) * LANES * bytes_of_x(call);
        call->lay_out(call, panel * LANES, column, to);
    }
}

/* What this build can do: 0 plain or NEON, 1 AVX2 or AVX-512, 2 AVX-512 with products of bfloat16 pairs. */
int edkm_lut_linear_level(void) {
    return TOGETHER == UNIT ? 1 + HAS_PAIRS : NARROW == 8;
}

/* What is said of matrices, whatever is done with them. */
INLINE Call call_of(const Packed *packed, int64_t dtype) {
    Call call = {.parts = packed->parts, .count = packed->count, .columns = packed->columns, .out_dtype = dtype};
    call.bits = (int)packed->bits;
    call.meaning = packed->levels ? (packed->bits == 8 ? BYTE : LEVEL) : packed->bits <= 4 ? SMALL : LARGE;
    return call;
}

/* outs[p] (tokens, rows of p) = x (tokens, columns), whose rows are `x_row` apart, times each matrix; rows of outs[p] are
 * `out_row` apart, with 0 one after the other. Returns 1 where memory is short. */
int edkm_lut_linear(
    const Packed *packed, const void *x, int64_t dtype, int64_t x_row, int64_t tokens, void *const *outs, int64_t out_row
) {
    Call call = call_of(packed, dtype);
    call.given = x, call.given_row = x_row;
    call.outs = outs, call.tokens = tokens, call.out_stride = out_row, call.x_stride = (call.columns + 127) / 128 * 128;
    int64_t rows = 0;
    int failed = 0, even = 1;
    for (int64_t p = 0; p < call.count; p++) {
        rows += call.parts[p].rows, call.units += (call.parts[p].rows + UNIT - 1) / UNIT;
        even &= even_tiles(&call, call.parts + p);
    }
    /* From so many tokens on, panels: measured. Gathered entries cost more, so that decoding them once pays sooner. */
    call.few = even && tokens < (call.meaning == LARGE ? 5 : 13) ? few_floats : NULL;
    call.lay_out_few = lay_out_rows, call.lay_out = lay_out_floats, call.decode = decode_floats;
    call.add = NARROW ? edkm_narrow_add : add_floats, call.short_of_memory = &failed;
    Part parts[MOST_PARTS];
    if (HAS_PAIRS) call.pairs = edkm_pairs_take(&call, parts);
    float *own = scratch((call.few && !call.pairs ? tokens : panels_of(&call) * LANES) * call.x_stride);
    if (!own) return 1;
    call.x = own, divide(&call);
    if (call.few) call.lay_out_few(&call, own);
    else share(lay_out_blocks, &call, panels_of(&call) * call.x_stride / 128, tokens * call.columns >= SHARED_WEIGHTS);
    int64_t groups = call.few ? 1 : (panels_of(&call) + call.group - 1) / call.group;
    share(multiply_units, &call, call.units * groups, rows * call.columns * tokens >= SHARED_PRODUCTS);
    return failed;
}

/* Dense rows of W: those that `ids` names, or `count` rows from `first` on; columns [from, end), `from` a multiple of 16. */
typedef struct {
    Call call;
    const int64_t *ids;
    void *out;
    int64_t first, count, from, end;
} Rows;

static void decode_units(const void *job, int64_t first, int64_t last) {
    const Rows *rows = job;
    const Call *call = &rows->call;
    const Part *part = call->parts;
    float w[DEPTH + LANES] __attribute__((aligned(64)));
    Unpacker u;
    Table table;
    Strip s = {.call = call, .part = part, .u = &u, .table = &table, .bits = call->bits};
    s.limit = part->indices + part->rows * row_bytes(call);
    table.group = -1;
    prepare(&u, call->bits, part->indices + part->rows * row_bytes(call));
    for (int64_t i = first * UNIT; i < smaller(last * UNIT, rows->count); i++) {
        int64_t row = rows->ids ? rows->ids[i] : rows->first + i, width = rows->end - rows->from;
        vf scale = call->meaning >= LEVEL ? splat(((const float *)part->lut)[row]) : splat(1);
        for (s.from = rows->from; s.from < rows->end; s.from = s.end) {
            s.end = smaller(s.from + DEPTH, rows->end);
            decode(&s, row, w);
            for (int64_t c = s.from, to = i * width + c - rows->from; c < s.end; c += LANES, to += LANES)
                write_lanes(rows->out, call->out_dtype, to, load_x(w + c - s.from) * scale, (int)smaller(LANES, s.end - c));
        }
    }
}

/* Decodes them into `out` (count, end - from). Returns 2 where an id names no row. */
int edkm_packed_rows(
    const Packed *packed, const int64_t *ids, int64_t first, int64_t count, int64_t from, int64_t end, int64_t dtype, void *out
) {
    Rows rows = {call_of(packed, dtype), ids, out, first, count, from, end};
    for (int64_t i = 0; ids && i < count; i++)
        if (ids[i] < 0 || ids[i] >= packed->parts->rows) return 2;
    share(decode_units, &rows, (count + UNIT - 1) / UNIT, count * (end - from) >= SHARED_WEIGHTS);
    return 0;
}

/* For each row of W and each of its tiles: sums of `values` over the weights that have the same code. */
typedef struct {
    Call call;
    const float *values; /* (rows, columns), from row `first` of W on */
    float *sums;         /* (rows, tiles of a row, 2^bits) */
    int64_t first, count;
} Sums;

enum { SUMMED = 256 }; /* values that are added up in one float32 */

/* Codes of at most four bits: all sums are in registers. `count` columns from byte `p` on. */
INLINE void sum_small(int bits, const Unpacker *u, const uint8_t *p, const float *values, int64_t count, float *sums) {
    vf acc[16] = {}, part;
    for (int64_t i = 0; i < count; i += LANES, p += 2 * bits) {
        vi codes = codes16(u, p) & splat_int((1 << bits) - 1);
        if (count - i >= LANES) part = (vf)*(const vfu *)(values + i);
        else part = splat(0), memcpy(&part, values + i, (size_t)(count - i) * sizeof(float));
        for (int j = 0; j < 1 << bits; j++) acc[j] = add_if_equal(acc[j], codes, splat_int(j), part);
    }
    for (int j = 0; j < 1 << bits; j++) sums[j] = (float)total(acc[j]);
}

static void sum_rows(const void *job, int64_t first, int64_t last) {
    const Sums *job_of = job;
    const Call *call = &job_of->call;
    const Part *part = call->parts;
    int bits = call->bits, k = 1 << bits;
    int64_t tile = part->tile_columns, across = call->columns / tile;
    Unpacker u;
    prepare(&u, bits, part->indices + part->rows * row_bytes(call));
    for (int64_t row = first * UNIT; row < smaller(last * UNIT, job_of->count); row++) {
        const uint8_t *bytes = part->indices + (job_of->first + row) * row_bytes(call);
        const float *values = job_of->values + row * call->columns;
        float *sums = job_of->sums + row * across * k;
        for (int64_t from = 0; from < call->columns; from += tile, values += tile, sums += k) {
            /* Where a register has fewer lanes, sums in registers take longer than sums in memory. */
            if (TOGETHER == UNIT && bits <= 4 && even_tiles(call, part)) {
                const uint8_t *p = bytes + from * bits / 8;
#define SUM_IF(n) if (bits == n) sum_small(n, &u, p, values, tile, sums);
                SUM_IF(1) SUM_IF(2) SUM_IF(3) SUM_IF(4)
                continue;
            }
            memset(sums, 0, (size_t)k * sizeof *sums);
            for (int64_t start = 0; start < tile; start += SUMMED) { /* sums of sums: one long sum loses a digit */
                float some[256];
                memset(some, 0, (size_t)k * sizeof *some);
                for (int64_t i = start; i < smaller(tile, start + SUMMED); i++) some[code_at(bytes, from + i, bits)] += values[i];
                for (int j = 0; j < k; j++) sums[j] += some[j];
            }
        }
    }
}

void edkm_sum_by_code(const Packed *packed, const float *values, int64_t first, int64_t count, float *sums) {
    Sums job = {call_of(packed, FLOAT32), values, sums, first, count};
    share(sum_rows, &job, (count + UNIT - 1) / UNIT, count * packed->columns >= SHARED_WEIGHTS);
}
