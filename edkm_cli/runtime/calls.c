/* Products with packed matrices, called from Python in about a microsecond: a matrix is prepared once, and a call asks x
 * for what the kernel needs, makes the results and runs it. It answers None for whatever it does not take.
 *
 * An extension module of its own, because it needs Python's headers, which not every machine has; without it, ctypes does
 * the same in three times the time (lut_linear_c.py).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "packed.h"

typedef __typeof__(edkm_lut_linear) Kernel;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Kernel *kernel;
    PyObject *block, *tensors;     /* bytes: struct Packed of lut_linear.c; tuple of what it points to */
    uint64_t *addresses;           /* of the tensors, when the block was made */
    int64_t columns, most[DTYPES]; /* elements of x in float32, bfloat16, float16 up to which the kernel is the way */
    Py_ssize_t count;
    int64_t rows[MOST_PARTS];
} Products;

static PyObject *tensor_type, *dtypes[DTYPES], *grad_enabled, *modes;

/* PyTorch's C interface for tensors in host memory (aoti_torch_*), which costs a third of `new_empty` from Python, and the
 * function that makes a Python object of a tensor. */
static struct {
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, void **tensor);
    int32_t (*data_ptr)(void *tensor, void **address);
    int32_t (*drop)(void *tensor);
    PyObject *(*wrap)(const void *tensor);
} torch;
static int dtype_numbers[DTYPES], cpu_number;

static PyObject *s_data_ptr, *s_dtype, *s_is_cpu, *s_shape, *s_is_contiguous, *s_requires_grad;

/* data_ptr() of a tensor; 0 with an error set where it has none. */
static uint64_t address_of(PyObject *tensor) {
    PyObject *number = PyObject_CallMethodNoArgs(tensor, s_data_ptr);
    if (!number) return 0;
    uint64_t address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return address;
}

/* Whether an attribute, or what a function without arguments returns, is true. Errors count as `otherwise`. */
static int is_true(PyObject *owned, int otherwise) {
    int truth = owned ? PyObject_IsTrue(owned) : -1;
    Py_XDECREF(owned);
    if (truth < 0) PyErr_Clear();
    return truth < 0 ? otherwise : truth;
}

static int watched(PyObject *x, const Products *self) {
    if (modes && is_true(PyObject_CallNoArgs(modes), 1)) return 1;
    if (!is_true(PyObject_CallNoArgs(grad_enabled), 1)) return 0;
    if (is_true(PyObject_GetAttr(x, s_requires_grad), 1)) return 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->tensors); i++)
        if (is_true(PyObject_GetAttr(PyTuple_GET_ITEM(self->tensors, i), s_requires_grad), 1)) return 1;
    return 0;
}

/* Number of x's dtype, or -1. */
static int dtype_of(PyObject *x) {
    PyObject *dtype = PyObject_GetAttr(x, s_dtype);
    int found = -1;
    for (int i = 0; dtype && i < DTYPES; i++)
        if (dtype == dtypes[i]) found = i;
    Py_XDECREF(dtype);
    return found;
}

/* x's shape into `shape` and its number of elements; dimensions, or -1. */
static int shape_of(PyObject *x, int64_t shape[MOST_DIMENSIONS], int64_t *elements) {
    PyObject *sizes = PyObject_GetAttr(x, s_shape);
    Py_ssize_t dimensions = sizes && PyTuple_Check(sizes) ? PyTuple_GET_SIZE(sizes) : -1;
    *elements = 1;
    if (dimensions > MOST_DIMENSIONS) dimensions = -1;
    for (Py_ssize_t i = 0; i < dimensions; i++) {
        shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
        *elements *= shape[i];
    }
    Py_XDECREF(sizes);
    return (int)dimensions;
}

/* A tensor of `shape`, with `last` instead of its last size, and its address; NULL with an error set where there is none. */
static PyObject *empty(int dtype, const int64_t *shape, int dimensions, int64_t last, void **address) {
    int64_t sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], stride = 1;
    for (int i = dimensions - 1; i >= 0; i--) {
        sizes[i] = i + 1 < dimensions ? shape[i] : last;
        strides[i] = stride;
        stride *= sizes[i];
    }
    void *tensor;
    if (torch.empty(dimensions, sizes, strides, dtype_numbers[dtype], cpu_number, 0, &tensor)) return PyErr_NoMemory();
    PyObject *out = torch.data_ptr(tensor, address) ? NULL : torch.wrap(tensor);
    torch.drop(tensor);
    return out || PyErr_Occurred() ? out : PyErr_NoMemory();
}

static PyObject *not_this_way(void) {
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* [x @ W.T + bias for each matrix], or None. */
static PyObject *multiply(PyObject *callable, PyObject *const *arguments, size_t flags, PyObject *names) {
    Products *self = (Products *)callable;
    if (PyVectorcall_NARGS(flags) != 1 || names) {
        PyErr_SetString(PyExc_TypeError, "a product takes one argument, x");
        return NULL;
    }
    PyObject *x = arguments[0];
    int64_t shape[MOST_DIMENSIONS], elements;
    if ((PyObject *)Py_TYPE(x) != tensor_type || watched(x, self)) return not_this_way();
    int dtype = dtype_of(x), dimensions = shape_of(x, shape, &elements);
    if (dtype < 0 || dimensions < 1 || shape[dimensions - 1] != self->columns || elements <= 0) return not_this_way();
    if (elements > self->most[dtype] || !is_true(PyObject_GetAttr(x, s_is_cpu), 0)) return not_this_way();
    if (!is_true(PyObject_CallMethodNoArgs(x, s_is_contiguous), 0)) return not_this_way();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->tensors); i++)
        if (address_of(PyTuple_GET_ITEM(self->tensors, i)) != self->addresses[i]) return not_this_way();
    uint64_t from = address_of(x);
    if (!from) return not_this_way();
    void *addresses[MOST_PARTS];
    PyObject *outs = PyList_New(self->count), *out = outs;
    for (Py_ssize_t i = 0; out && i < self->count; i++) {
        out = empty(dtype, shape, dimensions, self->rows[i], &addresses[i]);
        PyList_SET_ITEM(outs, i, out);
    }
    if (!out || PyErr_Occurred()) {
        Py_XDECREF(outs);
        return NULL;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = self->kernel(
        (void *)PyBytes_AS_STRING(self->block), (void *)(uintptr_t)from, dtype, self->columns, elements / self->columns, addresses, 0
    );
    Py_END_ALLOW_THREADS
    if (!failed) return outs;
    Py_DECREF(outs);
    return PyErr_NoMemory();
}

static void destroy(PyObject *object) {
    Products *self = (Products *)object;
    Py_XDECREF(self->block);
    Py_XDECREF(self->tensors);
    PyMem_Free(self->addresses);
    Py_TYPE(object)->tp_free(object);
}

static PyTypeObject Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "edkm_calls.Products",
    .tp_basicsize = sizeof(Products),
    .tp_dealloc = destroy,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Products, call),
    .tp_doc = "Call with x: the products with prepared matrices, or None where another way is to be taken.",
};

/* products(kernel address, block, tensors, columns, rows, most elements by dtype) */
static PyObject *products(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long kernel;
    long long columns, most[DTYPES];
    PyObject *block, *tensors, *rows;
    if (!PyArg_ParseTuple(
            arguments, "KSO!LO!(LLL)", &kernel, &block, &PyTuple_Type, &tensors, &columns, &PyTuple_Type, &rows, most,
            most + 1, most + 2
        ))
        return NULL;
    if (PyTuple_GET_SIZE(rows) > MOST_PARTS) return PyErr_Format(PyExc_ValueError, "at most %d matrices", MOST_PARTS);
    Products *self = PyObject_New(Products, &Type);
    if (!self) return NULL;
    Py_ssize_t held = PyTuple_GET_SIZE(tensors);
    self->call = multiply, self->kernel = (Kernel *)(uintptr_t)kernel, self->columns = columns;
    self->block = Py_NewRef(block), self->tensors = Py_NewRef(tensors), self->count = PyTuple_GET_SIZE(rows);
    self->addresses = PyMem_Malloc((size_t)(held ? held : 1) * sizeof(uint64_t));
    for (int i = 0; i < DTYPES; i++) self->most[i] = most[i];
    for (Py_ssize_t i = 0; i < self->count; i++) self->rows[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(rows, i));
    for (Py_ssize_t i = 0; self->addresses && i < held; i++)
        self->addresses[i] = address_of(PyTuple_GET_ITEM(tensors, i));
    if (!self->addresses) PyErr_NoMemory();
    if (PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

/* setup(Tensor, (float32, bfloat16, float16), is_grad_enabled, depth of dispatch modes or None, addresses of the functions
 * in `torch`, PyTorch's numbers of the dtypes and of host memory) */
static PyObject *setup(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *tensor, *given[DTYPES], *grad, *depth;
    unsigned long long at[4]; /* data and function addresses have one size wherever this runs */
    if (!PyArg_ParseTuple(
            arguments, "O(OOO)OO(KKKK)(iii)i", &tensor, given, given + 1, given + 2, &grad, &depth, at, at + 1, at + 2, at + 3,
            dtype_numbers, dtype_numbers + 1, dtype_numbers + 2, &cpu_number
        ))
        return NULL;
    tensor_type = Py_NewRef(tensor), grad_enabled = Py_NewRef(grad);
    modes = depth == Py_None ? NULL : Py_NewRef(depth);
    for (int i = 0; i < DTYPES; i++) dtypes[i] = Py_NewRef(given[i]);
    memcpy(&torch, at, sizeof at);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"products", products, METH_VARARGS, NULL}, {"setup", setup, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "edkm_calls", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_edkm_calls(void) {
    s_data_ptr = PyUnicode_InternFromString("data_ptr"), s_dtype = PyUnicode_InternFromString("dtype");
    s_is_cpu = PyUnicode_InternFromString("is_cpu"), s_shape = PyUnicode_InternFromString("shape");
    s_is_contiguous = PyUnicode_InternFromString("is_contiguous");
    s_requires_grad = PyUnicode_InternFromString("requires_grad");
    if (PyType_Ready(&Type) < 0) return NULL;
    return PyModule_Create(&definition);
}
