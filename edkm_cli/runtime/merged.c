/* The operator edkm::merged_linear on a CPU: packed matrices with one input, their products side by side.
 *
 * A compiled graph of a small model calls an operator a hundred times for a token, and what Python does around it costs as
 * much as the product. So the operator is registered from here, by the functions that PyTorch exports for extensions in C
 * (aoti_torch_*, torch_*), whose addresses Python hands over. Its arguments are the tensors themselves. What was prepared
 * for them is found by the address of the indices; whatever is not as it was prepared goes to another operator with the same
 * arguments, which is written in Python.
 */
#include "packed.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS 1024

typedef struct {
    int64_t columns, bits, levels, count;
    Part part;
} One; /* struct Packed with one matrix */

/* Matrices one below the other; Python lays this struct out (lut_linear_c.py). The tensors' addresses and numbers of elements;
 * `rows` of all matrices; `most`: elements of x, by dtype, up to which the kernel is the way. */
typedef struct {
    uint64_t indices, luts;
    int64_t index_bytes, entries, columns, rows, count, most[DTYPES];
    One parts[MOST_PARTS];
} Merged;

typedef struct Node {
    struct Node *next;
    Merged merged;
} Node;

/* PyTorch's functions, in the order in which Python hands them over. Arguments of an operator are a stack of 64-bit values;
 * who is called owns the tensors, lists and boxes of optional arguments among them. */
static struct {
    int32_t (*library)(const char *name, const char *key, const char *file, uint32_t line, void **library);
    int32_t (*implement)(void *library, const char *name, void (*function)(uint64_t *, uint64_t, uint64_t));
    int32_t (*call)(const char *name, const char *overload, uint64_t *stack);
    int32_t (*dimensions)(void *tensor, int64_t *);
    int32_t (*elements)(void *tensor, int64_t *);
    int32_t (*sizes)(void *tensor, int64_t **);
    int32_t (*dtype)(void *tensor, int32_t *);
    int32_t (*device)(void *tensor, int32_t *);
    int32_t (*is_contiguous)(void *tensor, _Bool *);
    int32_t (*address)(void *tensor, void **);
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t dtype, int32_t device, int32_t index, void **);
    int32_t (*drop)(void *tensor);
    int32_t (*drop_box)(uint64_t *);
    int32_t (*drop_list)(void *);
    const char *(*what)(void);
    void (*raise)(const char *message); /* a C++ exception */
} torch;
static int32_t dtype_numbers[DTYPES], cpu_number;
static const char *plain; /* the operator that is called otherwise */

static Node *buckets[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* operators run without Python's lock */

static Node **find(uint64_t indices) {
    Node **at = buckets + (indices >> 6) % BUCKETS;
    while (*at && (*at)->merged.indices != indices) at = &(*at)->next;
    return at;
}

/* Remembers what was prepared for the matrices whose indices lie at merged->indices. Returns 1 where memory is short. */
int edkm_merged_keep(const Merged *merged) {
    pthread_mutex_lock(&lock);
    Node **at = find(merged->indices), *node = *at;
    if (!node && (node = malloc(sizeof *node))) node->next = NULL, *at = node;
    if (node) node->merged = *merged;
    pthread_mutex_unlock(&lock);
    return !node;
}

/* Forgets it. Whoever is computing has a copy, and holds the tensors. */
void edkm_merged_forget(uint64_t indices) {
    pthread_mutex_lock(&lock);
    Node **at = find(indices), *node = *at;
    if (node) *at = node->next;
    pthread_mutex_unlock(&lock);
    free(node);
}

int64_t edkm_merged_count(void) {
    int64_t count = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUCKETS; i++)
        for (Node *node = buckets[i]; node; node = node->next) count++;
    pthread_mutex_unlock(&lock);
    return count;
}

static void *address_of(void *tensor) {
    void *address;
    return torch.address(tensor, &address) ? NULL : address;
}

static int has(void *tensor, int64_t elements) {
    int64_t count;
    return !torch.elements(tensor, &count) && count == elements;
}

/* What was prepared for these tensors, if they are still the same. */
static int recall(void *indices, void *luts, Merged *merged) {
    pthread_mutex_lock(&lock);
    const Node *node = *find((uint64_t)(uintptr_t)address_of(indices));
    if (node) memcpy(merged, &node->merged, offsetof(Merged, parts) + (size_t)node->merged.count * sizeof *merged->parts);
    pthread_mutex_unlock(&lock);
    return node && has(indices, merged->index_bytes) && has(luts, merged->entries) &&
           (uint64_t)(uintptr_t)address_of(luts) == merged->luts;
}

/* The kernels' number of a tensor's dtype where it lies contiguously in host memory, or -1. */
static int dtype_of(void *tensor) {
    _Bool contiguous;
    int32_t dtype, device;
    if (torch.dtype(tensor, &dtype) || torch.device(tensor, &device) || torch.is_contiguous(tensor, &contiguous)) return -1;
    for (int i = 0; contiguous && device == cpu_number && i < DTYPES; i++)
        if (dtype == dtype_numbers[i]) return i;
    return -1;
}

static int64_t bytes_of(int dtype) { return dtype == 0 ? 4 : 2; }

/* Gives each part its rows of the bias; 0 where that is not (rows,) of a dtype that kernels read. */
static int add_bias(Merged *merged, void *bias) {
    int64_t dimensions, *sizes;
    int dtype = dtype_of(bias);
    if (dtype < 0 || torch.dimensions(bias, &dimensions) || torch.sizes(bias, &sizes)) return 0;
    const char *at = address_of(bias);
    if (!at || dimensions != 1 || sizes[0] != merged->rows) return 0;
    for (int64_t p = 0; p < merged->count; p++) {
        Part *part = &merged->parts[p].part;
        part->bias = at, part->bias_dtype = dtype;
        at += part->rows * bytes_of(dtype);
    }
    return 1;
}

/* (..., rows) for x (..., columns), or NULL where this is not the way. */
static void *product(void *x, void *indices, void *luts, void *bias) {
    Merged merged;
    void *from = address_of(x), *out, *to, *outs[1];
    int64_t dimensions, *shape, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], elements = 1, stride = 1;
    int dtype = dtype_of(x), failed = 0;
    if (!from || dtype < 0 || torch.dimensions(x, &dimensions) || torch.sizes(x, &shape)) return NULL;
    if (dimensions < 1 || dimensions > MOST_DIMENSIONS || !recall(indices, luts, &merged)) return NULL;
    if (shape[dimensions - 1] != merged.columns) return NULL;
    if (bias && !add_bias(&merged, bias)) return NULL;
    for (int64_t i = dimensions - 1; i >= 0; i--) {
        elements *= shape[i];
        sizes[i] = i + 1 < dimensions ? shape[i] : merged.rows;
        strides[i] = stride;
        stride *= sizes[i];
    }
    if (elements < 1 || elements > merged.most[dtype]) return NULL;
    if (torch.empty(dimensions, sizes, strides, dtype_numbers[dtype], cpu_number, 0, &out)) return NULL;
    to = address_of(out);
    for (int64_t p = 0; to && !failed && p < merged.count; p++) {
        outs[0] = to;
        failed = edkm_lut_linear(
            (const Packed *)(merged.parts + p), from, dtype, merged.columns, elements / merged.columns, outs, merged.rows
        );
        to = (char *)to + merged.parts[p].part.rows * bytes_of(dtype);
    }
    if (to && !failed) return out;
    torch.drop(out);
    return NULL;
}

/* merged_linear(Tensor x, Tensor indices, Tensor luts, Tensor? bias, int[] numbers) -> Tensor */
static void merged_linear(uint64_t *stack, uint64_t arguments, uint64_t outputs) {
    (void)arguments, (void)outputs;
    uint64_t *box = (uint64_t *)(uintptr_t)stack[3];
    void *tensors[4];
    for (int i = 0; i < 3; i++) tensors[i] = (void *)(uintptr_t)stack[i];
    tensors[3] = box ? (void *)(uintptr_t)*box : NULL;
    void *out = product(tensors[0], tensors[1], tensors[2], tensors[3]);
    if (!out) {
        if (torch.call(plain, "", stack)) torch.raise(torch.what());
        return;
    }
    for (int i = 0; i < 4; i++)
        if (tensors[i]) torch.drop(tensors[i]);
    if (box) torch.drop_box(box);
    torch.drop_list((void *)(uintptr_t)stack[4]);
    stack[0] = (uint64_t)(uintptr_t)out;
}

/* Makes this the operator for the CPU. `functions`: addresses in the order of `torch`; `numbers`: PyTorch's of the dtypes
 * and of host memory. Not 0 where PyTorch refuses. */
int edkm_merged_register(const uint64_t *functions, const int32_t *numbers, const char *name, const char *otherwise) {
    void *library;
    memcpy(&torch, functions, sizeof torch);
    memcpy(dtype_numbers, numbers, sizeof dtype_numbers);
    cpu_number = numbers[DTYPES], plain = strdup(otherwise);
    return !plain || torch.library("edkm", "CPU", __FILE__, __LINE__, &library) || torch.implement(library, name, merged_linear);
}
