/* Products with packed matrices, called from Python in half a microsecond: a matrix is prepared once, and a call hands x to
 * tensors.c. It answers None for whatever that does not take.
 *
 * An extension module of its own, because it needs Python's headers, which not every machine has; without it, ctypes does
 * the same in several times the time (lut_linear_c.py).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "packed.h"

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *block, *tensors; /* bytes: struct Packed of packed.h; tuple of what it points to */
    void **addresses;          /* of the tensors, when the block was made */
    int64_t most[DTYPES];
} Products;

static PyObject *tensor_type, *modes, *s_requires_grad;
static Py_ssize_t offset; /* of PyTorch's tensor in Python's object of it */

/* edkm_product, and PyTorch's functions: the last one makes a Python object of a tensor. */
static struct {
    __typeof__(edkm_product) *product;
    int32_t (*address)(void *tensor, void **);
    int32_t (*drop)(void *tensor);
    _Bool (*grad_enabled)(void);
    PyObject *(*wrap)(const void *tensor);
} torch;

static void *tensor_of(PyObject *object) { return (char *)object + offset; }

static int requires_grad(PyObject *tensor) {
    PyObject *answer = PyObject_GetAttr(tensor, s_requires_grad);
    Py_XDECREF(answer);
    return answer != Py_False;
}

/* Whether somebody watches what is done with x (`unwatched` in lut_linear_c.py), or a matrix has moved since. */
static int changed(PyObject *x, const Products *self) {
    PyObject *depth = modes ? PyObject_CallNoArgs(modes) : NULL;
    int watched = modes && (!depth || PyObject_IsTrue(depth)), grad = torch.grad_enabled();
    Py_XDECREF(depth);
    if (watched || (grad && requires_grad(x))) return 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->tensors); i++) {
        PyObject *tensor = PyTuple_GET_ITEM(self->tensors, i);
        void *address;
        if (torch.address(tensor_of(tensor), &address) || address != self->addresses[i]) return 1;
        if (grad && requires_grad(tensor)) return 1;
    }
    return 0;
}

/* [x @ W.T + bias for each matrix], or None. */
static PyObject *multiply(PyObject *callable, PyObject *const *arguments, size_t flags, PyObject *names) {
    Products *self = (Products *)callable;
    if (PyVectorcall_NARGS(flags) != 1 || names) {
        PyErr_SetString(PyExc_TypeError, "a product takes one argument, x");
        return NULL;
    }
    const Packed *packed = (const void *)PyBytes_AS_STRING(self->block);
    void *outs[MOST_PARTS];
    int failed = -1;
    if ((PyObject *)Py_TYPE(arguments[0]) == tensor_type && !changed(arguments[0], self)) {
        Py_BEGIN_ALLOW_THREADS
        failed = torch.product(tensor_of(arguments[0]), packed, self->most, outs);
        Py_END_ALLOW_THREADS
    }
    PyErr_Clear();
    if (failed < 0) Py_RETURN_NONE;
    if (failed) return PyErr_NoMemory();
    PyObject *list = PyList_New(packed->count);
    for (int64_t i = 0; i < packed->count; i++) {
        PyObject *out = list ? torch.wrap(outs[i]) : NULL;
        torch.drop(outs[i]);
        if (out) PyList_SET_ITEM(list, i, out);
        else Py_CLEAR(list);
    }
    return list;
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

/* products(block, tensors, most elements by dtype) */
static PyObject *products(PyObject *module, PyObject *arguments) {
    (void)module;
    long long most[DTYPES];
    PyObject *block, *tensors;
    if (!PyArg_ParseTuple(arguments, "SO!(LLL)", &block, &PyTuple_Type, &tensors, most, most + 1, most + 2)) return NULL;
    Py_ssize_t held = PyTuple_GET_SIZE(tensors);
    Products *self = PyObject_New(Products, &Type);
    if (!self) return NULL;
    self->call = multiply, self->block = Py_NewRef(block), self->tensors = Py_NewRef(tensors);
    self->addresses = PyMem_Calloc((size_t)held, sizeof *self->addresses);
    for (int i = 0; i < DTYPES; i++) self->most[i] = most[i];
    for (Py_ssize_t i = 0; self->addresses && i < held; i++)
        torch.address(tensor_of(PyTuple_GET_ITEM(tensors, i)), self->addresses + i);
    if (self->addresses) return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

/* setup(Tensor, depth of dispatch modes or None, offset, addresses of the functions in `torch`) */
static PyObject *setup(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *tensor, *depth;
    unsigned long long at[5]; /* data and function addresses have one size wherever this runs */
    if (!PyArg_ParseTuple(arguments, "OOnKKKKK", &tensor, &depth, &offset, at, at + 1, at + 2, at + 3, at + 4)) return NULL;
    tensor_type = Py_NewRef(tensor), modes = depth == Py_None ? NULL : Py_NewRef(depth);
    memcpy(&torch, at, sizeof at);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"products", products, METH_VARARGS, NULL}, {"setup", setup, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "edkm_calls", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_edkm_calls(void) {
    s_requires_grad = PyUnicode_InternFromString("requires_grad");
    if (PyType_Ready(&Type) < 0) return NULL;
    return PyModule_Create(&definition);
}
