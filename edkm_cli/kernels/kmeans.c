/* Exact weighted k-means of numbers, group by group: the start of the clustering.
 *
 * In one dimension clusters are intervals of the sorted values. With prefix sums of mass S0 and mass * value S1, an
 * interval (m, i] explains (S1[i] - S1[m])^2 / (S0[i] - S0[m]) of the squares, and best[q][i] = max over m of
 * best[q-1][m] + explained(m, i) is the best split of the first i values into q intervals. The best m never decreases
 * with i or with q, so halving i halves the range of m: O(k u log u) for u distinct values (Ckmeans.1d.dp, Wang and Song
 * 2011). Splits into fewer intervals are on the way to those into more: several k cost what the largest does.
 * More than LIMIT distinct values may only be cut at LIMIT evenly spaced ranks; Lloyd's iteration then converges on all.
 */
#include <stdlib.h>

#include "lanes.h"

#define LIMIT 65536
#define LLOYD_STEPS 200
#define SHORT 64 /* beginnings that may be tried one after the other for a vector of ends at once */

#define DOUBLES (LANES / 2)

typedef double vd __attribute__((vector_size(8 * DOUBLES), aligned(8 * DOUBLES)));
typedef int64_t vl __attribute__((vector_size(8 * DOUBLES), aligned(8 * DOUBLES)));
typedef double vdu __attribute__((vector_size(8 * DOUBLES), aligned(8)));

typedef struct {
    uint32_t key;
    float mass;
} Item;

typedef struct {
    Item *items, *spare;
    double *values, *mass, *moment; /* distinct values; prefix sums of length u + 1 */
    int64_t *cuts;                  /* ranks at which intervals may be cut, `points` + 1 of them */
    double *cut_mass, *cut_moment, *best, *previous;
    int32_t *from; /* [k][points + 1]: where the last interval begins */
    int64_t points;
} Work;

/* Bits of a float that order like the float does, and back. */
INLINE uint32_t ordered(float x) {
    union { float f; uint32_t u; } bits = {x + 0.0f}; /* -0 becomes +0 */
    return bits.u ^ (bits.u >> 31 ? 0xffffffffu : 0x80000000u);
}

INLINE float unordered(uint32_t key) {
    union { uint32_t u; float f; } bits = {key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)};
    return bits.f;
}

/* Radix sort by key, a byte at a time; leaves the result in work->items. */
static void sort_items(Work *work, int64_t n) {
    int64_t counts[4][256] = {{0}};
    for (int64_t i = 0; i < n; i++)
        for (int b = 0; b < 4; b++) counts[b][work->items[i].key >> (8 * b) & 255]++;
    for (int b = 0; b < 4; b++) {
        int64_t at = 0;
        for (int v = 0; v < 256; v++) {
            int64_t count = counts[b][v];
            counts[b][v] = at;
            at += count;
        }
        for (int64_t i = 0; i < n; i++) work->spare[counts[b][work->items[i].key >> (8 * b) & 255]++] = work->items[i];
        Item *swap = work->items;
        work->items = work->spare, work->spare = swap;
    }
}

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Masses sum to one: what is below a rounding error of that is none. */
INLINE double explained(double moment, double mass) { return moment * moment / (mass > 1e-16 ? mass : 1e-16); }

INLINE vl numbers_from(int64_t first) {
    vl numbers;
    for (int l = 0; l < DOUBLES; l++) numbers[l] = first + l;
    return numbers;
}

/* The best beginning m in [low, high] of the last interval ending at i. */
static int32_t best_begin(const Work *work, int64_t i, int64_t low, int64_t high, double *value) {
    const double *mass = work->cut_mass, *moment = work->cut_moment, *previous = work->previous;
    double best = -1;
    int64_t at = low, m = low;
    if (high - low >= 15) {
        const vd tiny = 1e-16 - (vd){};
        vd top = -1.0 - (vd){};
        vl where = {}, index = numbers_from(low);
        for (; m + DOUBLES <= high + 1; m += DOUBLES, index += DOUBLES) {
            vd s1 = moment[i] - *(const vdu *)(moment + m), s0 = mass[i] - *(const vdu *)(mass + m);
            vl some = s0 > tiny;
            s0 = (vd)(((vl)s0 & some) | ((vl)tiny & ~some));
            vd candidate = *(const vdu *)(previous + m) + s1 * s1 / s0;
            vl better = candidate > top;
            top = (vd)(((vl)candidate & better) | ((vl)top & ~better));
            where = (index & better) | (where & ~better);
        }
        for (int l = 0; l < DOUBLES; l++)
            if (top[l] > best || (top[l] == best && where[l] < at)) best = top[l], at = where[l];
    }
    for (; m <= high; m++) {
        double candidate = previous[m] + explained(moment[i] - moment[m], mass[i] - mass[m]);
        if (candidate > best) best = candidate, at = m;
    }
    *value = best;
    return (int32_t)at;
}

/* Consecutive ends from `first` on, as far as `last`, a lane each: where ranges are short, this is what costs least. */
static void fill_lanes(Work *work, int32_t *from, int64_t first, int64_t last, int64_t low, int64_t high) {
    const double *mass = work->cut_mass, *moment = work->cut_moment;
    const vd tiny = 1e-16 - (vd){}, mass_to = *(const vdu *)(mass + first), moment_to = *(const vdu *)(moment + first);
    vd top = -1.0 - (vd){};
    vl where = low - (vl){}, end = numbers_from(first);
    for (int64_t m = low; m <= smaller(high, last); m++) {
        vd s1 = moment_to - moment[m], s0 = mass_to - mass[m];
        vl some = s0 > tiny;
        s0 = (vd)(((vl)s0 & some) | ((vl)tiny & ~some));
        vd candidate = work->previous[m] + s1 * s1 / s0;
        vl better = (candidate > top) & (m <= end);
        top = (vd)(((vl)candidate & better) | ((vl)top & ~better));
        where = (m & better) | (where & ~better);
    }
    for (int64_t l = 0; l <= last - first; l++) work->best[first + l] = top[l], from[first + l] = (int32_t)where[l];
}

/* The best beginnings for all ends in [first, last], which lie in [low, high] and not below those for an interval less. */
static void fill(Work *work, int32_t *from, const int32_t *fewer, int64_t first, int64_t last, int64_t low, int64_t high) {
    while (first <= last) {
        if (last - first < DOUBLES && high - low < SHORT) {
            fill_lanes(work, from, first, last, larger(low, fewer[first]), high);
            return;
        }
        int64_t middle = (first + last) / 2, least = larger(low, fewer[middle]);
        int32_t at = best_begin(work, middle, least, smaller(high, middle), &work->best[middle]);
        from[middle] = at;
        fill(work, from, fewer, first, middle - 1, low, at);
        first = middle + 1, low = at;
    }
}

/* All splits into up to k intervals, of which the last matters for all of the values only. */
static void solve(Work *work, int64_t k) {
    int64_t points = work->points;
    for (int64_t i = 0; i <= points; i++) work->from[i] = 0;
    for (int64_t i = 0; i <= points; i++) work->best[i] = explained(work->cut_moment[i], work->cut_mass[i]);
    for (int64_t q = 1; q < k; q++) {
        double *swap = work->previous;
        work->previous = work->best, work->best = swap;
        int32_t *from = work->from + q * (points + 1), *fewer = from - (points + 1);
        if (q == k - 1) from[points] = best_begin(work, points, fewer[points], points, &work->best[points]);
        else fill(work, from, fewer, 0, points, 0, points);
    }
}

/* Ranks of the k - 1 inner cuts of the best split, ascending, in `edges`. */
static void trace(const Work *work, int64_t k, int64_t *edges) {
    int64_t end = work->points;
    for (int64_t q = k - 1; q > 0; q--) {
        end = work->from[q * (work->points + 1) + end];
        edges[q - 1] = work->cuts[end];
    }
}

static int64_t rank_of(const double *values, int64_t count, double limit) {
    int64_t low = 0, high = count; /* number of values below or at the limit */
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (values[middle] <= limit) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Mean of an interval, kept inside it: a mass too small for the prefix sums leaves rounding, or 0 / 0. */
static double mean_of(const Work *work, int64_t from, int64_t to) {
    double mass = work->mass[to] - work->mass[from], low = work->values[from], high = work->values[to - 1];
    double mean = mass > 0 ? (work->moment[to] - work->moment[from]) / mass : work->values[(from + to) / 2];
    return mean < low ? low : mean > high ? high : mean;
}

static void lloyd(const Work *work, int64_t u, int64_t k, int64_t *edges) {
    for (int step = 0; step < LLOYD_STEPS; step++) {
        int moved = 0;
        int64_t before = 0;
        for (int64_t q = 0; q + 1 < k; q++) {
            int64_t old = edges[q], end = q + 2 < k ? edges[q + 1] : u;
            if (old > before && end > old) {
                edges[q] = rank_of(work->values, u, (mean_of(work, before, old) + mean_of(work, old, end)) / 2);
                moved |= edges[q] != old;
            }
            before = edges[q];
        }
        if (!moved) return;
    }
}

/* Sorts, merges equal values and makes the prefix sums about the mean; returns the number of distinct values. */
static int64_t prepare(Work *work, const float *values, const float *importance, int64_t n, double *center) {
    int64_t kept = 0, u = 0;
    double mass = 0, moment = 0;
    for (int64_t pass = 0; pass < 2 && !kept; pass++) /* importance zero everywhere counts as none given */
        for (int64_t i = 0; i < n; i++) {
            Item item = {ordered(values[i]), importance && !pass ? importance[i] : 1.0f};
            if (item.mass > 0) work->items[kept++] = item, mass += item.mass, moment += (double)item.mass * values[i];
        }
    *center = moment / mass;
    sort_items(work, kept);
    work->mass[0] = work->moment[0] = 0;
    for (int64_t i = 0; i < kept; i++) {
        if (i == 0 || work->items[i].key != work->items[i - 1].key) {
            work->values[u++] = unordered(work->items[i].key) - *center;
            work->mass[u] = work->mass[u - 1], work->moment[u] = work->moment[u - 1];
        }
        double m = work->items[i].mass / mass; /* relative, so that no unit of importance under- or overflows */
        work->mass[u] += m, work->moment[u] += m * work->values[u - 1];
    }
    return u;
}

/* Centroids of one group for each of `count` numbers k, the largest last, one after the other. */
static void cluster(
    Work *work, const float *values, const float *importance, int64_t n, const int64_t *ks, int64_t count, float *centroids
) {
    double center;
    int64_t u = prepare(work, values, importance, n, &center), edges[MAX_K], most = 0;
    for (int64_t c = 0; c < count; c++)
        if (ks[c] < u) most = ks[c];
    work->points = smaller(u, LIMIT);
    for (int64_t p = 0; p <= work->points; p++) {
        work->cuts[p] = u * p / work->points;
        work->cut_mass[p] = work->mass[work->cuts[p]], work->cut_moment[p] = work->moment[work->cuts[p]];
    }
    solve(work, most);
    for (int64_t c = 0; c < count; centroids += ks[c++]) {
        int64_t k = ks[c];
        if (u <= k) { /* every value is a centroid; spare entries repeat the last */
            for (int64_t j = 0; j < k; j++) centroids[j] = (float)(work->values[smaller(j, u - 1)] + center);
            continue;
        }
        trace(work, k, edges);
        if (u > LIMIT) lloyd(work, u, k, edges);
        for (int64_t j = 0, before = 0; j < k; j++) {
            int64_t end = j + 1 < k ? edges[j] : u;
            double mean = end > before ? mean_of(work, before, end) : work->values[smaller(before, u - 1)];
            centroids[j] = (float)(mean + center);
            before = end;
        }
    }
}

/* values and importance (groups, n), importance may be NULL; ks (count,) ascending; centroids (groups, sum of ks). Returns
 * 0, or 1 without memory. */
int edkm_kmeans(
    const float *values, const float *importance, int64_t n, const int64_t *ks, int64_t count, float *centroids,
    int64_t first, int64_t last
) {
    int64_t points = smaller(n, LIMIT), of_eight = 2 * n + 3 * (n + 1) + 5 * (points + 1), all = 0; /* bytes: items, too */
    for (int64_t c = 0; c < count; c++) all += ks[c];
    Item *room = malloc(of_eight * sizeof(double) + ks[count - 1] * (points + 1) * sizeof(int32_t));
    if (!room) return 1;
    Work work = {.items = room, .spare = room + n, .values = (double *)(room + 2 * n)};
    work.mass = work.values + n + 1, work.moment = work.mass + n + 1, work.cut_mass = work.moment + n + 1;
    work.cut_moment = work.cut_mass + points + 1, work.best = work.cut_moment + points + 1;
    work.previous = work.best + points + 1, work.cuts = (int64_t *)(work.previous + points + 1);
    work.from = (int32_t *)(work.cuts + points + 1);
    for (int64_t g = first; g < last; g++)
        cluster(&work, values + g * n, importance ? importance + g * n : NULL, n, ks, count, centroids + g * all);
    free(room);
    return 0;
}
