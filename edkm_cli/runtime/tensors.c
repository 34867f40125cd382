/* Products of PyTorch's tensors without Python: of matrices that Python prepared (calls.c), and the operator
 * edkm::merged_linear on a CPU: packed matrices with one input, their products side by side.
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
 * `rows` of all matrices; `most`: as for edkm_product. */
typedef struct {
    uint64_t indices, luts;
    int64_t index_bytes, entries, columns, rows, count, most[DTYPES];
    One parts[MOST_PARTS];
} Merged;

typedef struct Node {
    struct Node *next;
    Merged merged;
} Node;

/* PyTorch's functions, in the order in which Python hands them over: those of tensors, then those of operators. Arguments of an
 * operator are a stack of 64-bit values; who is called owns the tensors, lists and boxes of optional arguments among them. */
static struct {
    int32_t (*dimensions)(void *tensor, int64_t *);
    int32_t (*sizes)(void *tensor, int64_t **);
    int32_t (*dtype)(void *tensor, int32_t *);
    int32_t (*device)(void *tensor, int32_t *);
    int32_t (*is_contiguous)(void *tensor, _Bool *);
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t dtype, int32_t device, int32_t index, void **);
    int32_t (*address)(void *tensor, void **);
    int32_t (*drop)(void *tensor);
    int32_t (*elements)(void *tensor, int64_t *);
    int32_t (*library)(const char *name, const char *key, const char *file, uint32_t line, void **library);
    int32_t (*implement)(void *library, const char *name, void (*function)(uint64_t *, uint64_t, uint64_t));
    int32_t (*call)(const char *name, const char *overload, uint64_t *stack);
    int32_t (*drop_box)(uint64_t *);
    int32_t (*drop_list)(void *);
    const char *(*what)(void);
    void (*raise)(const char *message); /* a C++ exception */
} torch;
static int32_t dtype_numbers[DTYPES], cpu_number;

/* `functions`: `count` addresses in the order of `torch`; `numbers`: PyTorch's of the dtypes and of host memory. */
void edkm_torch(const uint64_t *functions, int count, const int32_t *numbers) {
    memcpy(&torch, functions, (size_t)count * sizeof *functions);
    memcpy(dtype_numbers, numbers, sizeof dtype_numbers);
    cpu_number = numbers[DTYPES];
}

static void *address_of(void *tensor) {
    void *address;
    return torch.address(tensor, &address) ? NULL : address;
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

/* What an activation is; `elements` of it, `data` in host memory. */
typedef struct {
    const void *data;
    int64_t dimensions, elements, sizes[MOST_DIMENSIONS];
    int dtype;
} Input;

/* Whether a tensor is (..., columns), contiguous, of a dtype that kernels read, and not more than the `most` elements. */
static int read_input(void *tensor, int64_t columns, const int64_t most[DTYPES], Input *x) {
    int64_t *sizes;
    x->dtype = dtype_of(tensor), x->elements = 1;
    if (x->dtype < 0 || torch.dimensions(tensor, &x->dimensions) || torch.sizes(tensor, &sizes)) return 0;
    if (x->dimensions < 1 || x->dimensions > MOST_DIMENSIONS || sizes[x->dimensions - 1] != columns) return 0;
    for (int64_t i = 0; i < x->dimensions; i++) x->elements *= x->sizes[i] = sizes[i];
    return x->elements > 0 && x->elements <= most[x->dtype] && (x->data = address_of(tensor));
}

/* A new tensor (..., rows) and its address, or NULL. */
static void *result(Input *x, int64_t rows, void **address) {
    int64_t strides[MOST_DIMENSIONS], stride = 1;
    void *out;
    x->sizes[x->dimensions - 1] = rows;
    for (int64_t i = x->dimensions - 1; i >= 0; i--) strides[i] = stride, stride *= x->sizes[i];
    if (torch.empty(x->dimensions, x->sizes, strides, dtype_numbers[x->dtype], cpu_number, 0, &out)) return NULL;
    if ((*address = address_of(out))) return out;
    torch.drop(out);
    return NULL;
}

/* outs[p] = x @ W.T + bias for each matrix, new tensors; `most`: elements of x, by dtype, up to which the kernel is the way. */
int edkm_product(void *tensor, const Packed *packed, const int64_t most[DTYPES], void *outs[MOST_PARTS]) {
    Input x;
    void *to[MOST_PARTS];
    int64_t made = 0;
    if (!read_input(tensor, packed->columns, most, &x)) return -1;
    while (made < packed->count && (outs[made] = result(&x, packed->parts[made].rows, to + made))) made++;
    int64_t tokens = x.elements / packed->columns;
    if (made == packed->count && !edkm_lut_linear(packed, x.data, x.dtype, packed->columns, tokens, to, 0)) return 0;
    while (made) torch.drop(outs[--made]);
    return 1;
}

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

/* Forgets it; whether there was something. Whoever is computing has a copy, and holds the tensors. */
int edkm_merged_forget(uint64_t indices) {
    pthread_mutex_lock(&lock);
    Node **at = find(indices), *node = *at;
    const int found = node != NULL;
    if (found) *at = node->next;
    pthread_mutex_unlock(&lock);
    free(node);
    return found;
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
static void *merged_product(void *tensor, void *indices, void *luts, void *bias) {
    Merged merged;
    Input x;
    void *to;
    if (!recall(indices, luts, &merged) || !read_input(tensor, merged.columns, merged.most, &x)) return NULL;
    if (bias && !add_bias(&merged, bias)) return NULL;
    void *out = result(&x, merged.rows, &to);
    for (int64_t p = 0; out && p < merged.count; p++) {
        const Packed *packed = (const Packed *)(merged.parts + p);
        if (edkm_lut_linear(packed, x.data, x.dtype, merged.columns, x.elements / merged.columns, &to, merged.rows)) {
            torch.drop(out);
            return NULL;
        }
        to = (char *)to + packed->parts->rows * bytes_of(x.dtype);
    }
    return out;
}

/* merged_linear(Tensor x, Tensor indices, Tensor luts, Tensor? bias, int[] numbers) -> Tensor */
static void merged_linear(uint64_t *stack, uint64_t arguments, uint64_t outputs) {
    (void)arguments, (void)outputs;
    uint64_t *box = (uint64_t *)(uintptr_t)stack[3];
    void *tensors[4];
    for (int i = 0; i < 3; i++) tensors[i] = (void *)(uintptr_t)stack[i];
    tensors[3] = box ? (void *)(uintptr_t)*box : NULL;
    void *out = merged_product(tensors[0], tensors[1], tensors[2], tensors[3]);
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

/* Makes this the operator for the CPU. Not 0 where PyTorch refuses. */
int edkm_merged_register(const char *name, const char *otherwise) {
    void *library;
    plain = strdup(otherwise);
    return !plain || torch.library("edkm", "CPU", __FILE__, __LINE__, &library) || torch.implement(library, name, merged_linear);
}
