/* DLPack tensors, made and taken: as capsules, and through the table of C functions that a library may offer.
 *
 * In C because the deleter may be called by any thread, without the interpreter lock, and after the interpreter is
 * gone: then it must leak, not crash.  Layout after the DLPack specification 1.x.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t type;
    int32_t id;
} Device;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DataType;

typedef struct {
    void *data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct Unversioned {
    Tensor tensor;
    void *context;
    void (*deleter)(struct Unversioned *);
} Unversioned;

typedef struct Versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct Versioned *);
    uint64_t flags;
    Tensor tensor;
} Versioned;

/* DLPack's table of a library's own C functions, `__dlpack_c_exchange_api__` of its tensor type.  None of them orders
 * streams. */
typedef struct {
    struct {
        uint32_t major, minor;
        void *older;
    } header;
    void *allocate;
    int (*from_object)(void *object, Versioned **out);
    int (*to_object)(Versioned *form, void **object);
    void *describe_object;
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} Exchange;

enum { MAJOR = 1, MINOR = 0, MOST_DIMENSIONS = 64 };
enum { CUDA = 2, CUDA_MANAGED = 13 };
enum { READ_ONLY = 1 };

static const char *const NAME[] = {"dltensor", "dltensor_versioned"};
static const char *const USED[] = {"used_dltensor", "used_dltensor_versioned"};
static const char *const HELD[] = {"memferry.dltensor", "memferry.dltensor_versioned"};

static int interpreter_is_going;

static int is_known(uint32_t major) {
    if (major != MAJOR) PyErr_Format(PyExc_BufferError, "DLPack version %u is not supported, only 1", major);
    return major == MAJOR;
}

static const Exchange *exchange_of(PyObject *table) {
    const Exchange *exchange = PyCapsule_GetPointer(table, "dlpack_exchange_api");
    return exchange && is_known(exchange->header.major) ? exchange : NULL;
}

/* Whether a function of a library's table refused; it says why, or this does. */
static int refused(int answer) {
    if (answer && !PyErr_Occurred()) PyErr_SetString(PyExc_BufferError, "the other library refuses, and says no reason");
    return answer;
}

/* ---- made here ---------------------------------------------------------------------------------------------- */

/* What one export consists of: both forms begin with what their deleter gets. */
typedef struct {
    union {
        Unversioned unversioned;
        Versioned versioned;
    } form;
    PyObject *owner;
    int offered, let_go; /* while it is offered, letting go is only noted */
    int64_t numbers[];   /* the shape, then the strides */
} Export;

static void drop(Export *export) {
    if (export->offered) {
        export->let_go = 1;
        return;
    }
    if (interpreter_is_going || !Py_IsInitialized()) return; /* leak: nobody is left to free for */
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DecRef(export->owner);
    PyGILState_Release(state);
    free(export);
}

static void drop_unversioned(Unversioned *form) { drop((Export *)form->context); }
static void drop_versioned(Versioned *form) { drop((Export *)form->context); }

/* A capsule nobody took still owns its export; one that was taken has another name. */
static void capsule_gone(PyObject *capsule) {
    for (int versioned = 0; versioned < 2; versioned++) {
        if (!PyCapsule_IsValid(capsule, NAME[versioned])) continue;
        void *form = PyCapsule_GetPointer(capsule, NAME[versioned]);
        if (versioned)
            ((Versioned *)form)->deleter(form);
        else
            ((Unversioned *)form)->deleter(form);
    }
}

enum { OWNER, PTR, SHAPE, TYPE, DEVICE_TYPE, DEVICE_ID, DESCRIPTION };

/* The export that DESCRIPTION arguments describe, in C order; it holds its owner. */
static Export *describe(PyObject *const *args, int versioned, int read_only) {
    Py_ssize_t ndim = PyTuple_Size(args[SHAPE]);
    if (ndim < 0) return NULL;
    if (ndim > MOST_DIMENSIONS) {
        PyErr_SetString(PyExc_ValueError, "more than 64 dimensions");
        return NULL;
    }
    unsigned long type = PyLong_AsUnsignedLong(args[TYPE]);
    Tensor tensor = {
        .data = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[PTR]),
        .device = {(int32_t)PyLong_AsLong(args[DEVICE_TYPE]), (int32_t)PyLong_AsLong(args[DEVICE_ID])},
        .ndim = (int32_t)ndim,
        .dtype = {(uint8_t)type, (uint8_t)(type >> 8), (uint16_t)(type >> 16)},
    };
    if (PyErr_Occurred()) return NULL;
    Export *export = calloc(1, sizeof *export + 2 * (size_t)ndim * sizeof(int64_t));
    if (!export) {
        PyErr_NoMemory();
        return NULL;
    }
    tensor.shape = export->numbers;
    tensor.strides = export->numbers + ndim;
    uint64_t step = 1; /* unsigned: beside a dimension of 0 the others may be anything */
    for (Py_ssize_t i = ndim - 1; i >= 0; i--) {
        tensor.shape[i] = PyLong_AsLongLong(PyTuple_GetItem(args[SHAPE], i));
        tensor.strides[i] = (int64_t)step;
        step *= tensor.shape[i] > 1 ? (uint64_t)tensor.shape[i] : 1;
    }
    if (PyErr_Occurred()) {
        free(export);
        return NULL;
    }
    if (versioned)
        export->form.versioned = (Versioned){.major = MAJOR,
                                             .minor = MINOR,
                                             .context = export,
                                             .deleter = drop_versioned,
                                             .flags = read_only ? READ_ONLY : 0,
                                             .tensor = tensor};
    else
        export->form.unversioned = (Unversioned){.tensor = tensor, .context = export, .deleter = drop_unversioned};
    Py_IncRef(args[OWNER]);
    export->owner = args[OWNER];
    return export;
}

static int has_arguments(const char *name, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, %zd were given", name, wanted, given);
    return 0;
}

static PyObject *make(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!has_arguments("make", count, DESCRIPTION + 2)) return NULL;
    int read_only = PyObject_IsTrue(args[DESCRIPTION]), versioned = PyObject_IsTrue(args[DESCRIPTION + 1]);
    if (read_only < 0 || versioned < 0) return NULL;
    Export *export = describe(args, versioned, read_only);
    if (!export) return NULL;
    PyObject *capsule = PyCapsule_New(&export->form, NAME[versioned], capsule_gone);
    if (!capsule) drop(export);
    return capsule;
}

static PyObject *make_object(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!has_arguments("make_object", count, DESCRIPTION + 1)) return NULL;
    const Exchange *exchange = exchange_of(args[DESCRIPTION]);
    Export *export = exchange ? describe(args, 1, 0) : NULL;
    if (!export) return NULL;
    void *object = NULL;
    export->offered = 1; /* a library that refuses may have let go already, or not */
    int failed = refused(exchange->to_object(&export->form.versioned, &object));
    export->offered = 0;
    if (failed || export->let_go) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        drop(export);
        PyErr_Restore(type, value, traceback);
    }
    return failed ? NULL : object;
}

/* ---- taken from others -------------------------------------------------------------------------------------- */

static void holder_gone(PyObject *holder) {
    for (int versioned = 0; versioned < 2; versioned++) {
        if (!PyCapsule_IsValid(holder, HELD[versioned])) continue;
        void *form = PyCapsule_GetPointer(holder, HELD[versioned]);
        if (versioned) {
            if (((Versioned *)form)->deleter) ((Versioned *)form)->deleter(form);
        } else if (((Unversioned *)form)->deleter) {
            ((Unversioned *)form)->deleter(form);
        }
    }
}

static PyObject *numbers(const int64_t *values, int32_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (int32_t i = 0; tuple && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (!value || PyTuple_SetItem(tuple, i, value) < 0) {
            Py_DecRef(tuple);
            return NULL;
        }
    }
    return tuple;
}

/* What Python learns of a tensor: the holder that keeps it, and its description; the tensor stays the caller's if this
 * fails, and so does the holder's destructor. */
static PyObject *learn(void *form, int versioned, PyObject **holder) {
    const Tensor *tensor = versioned ? &((Versioned *)form)->tensor : &((Unversioned *)form)->tensor;
    int read_only = versioned && (((Versioned *)form)->flags & READ_ONLY);
    PyObject *shape = numbers(tensor->shape, tensor->ndim);
    PyObject *strides = tensor->strides ? numbers(tensor->strides, tensor->ndim) : Py_BuildValue("");
    *holder = PyCapsule_New(form, HELD[versioned], NULL);
    if (!shape || !strides || !*holder) {
        Py_DecRef(shape);
        Py_DecRef(strides);
        Py_DecRef(*holder);
        return NULL;
    }
    unsigned long long ptr = (unsigned long long)(uintptr_t)tensor->data + tensor->byte_offset;
    unsigned long type =
        tensor->dtype.code | (unsigned long)tensor->dtype.bits << 8 | (unsigned long)tensor->dtype.lanes << 16;
    return Py_BuildValue("NKNNk(ii)O", *holder, ptr, shape, strides, type, tensor->device.type, tensor->device.id,
                         read_only ? Py_True : Py_False);
}

static PyObject *take(PyObject *module, PyObject *capsule) {
    (void)module;
    int versioned = PyCapsule_IsValid(capsule, NAME[1]);
    if (!versioned && !PyCapsule_IsValid(capsule, NAME[0])) {
        PyErr_SetString(PyExc_ValueError, "not a DLPack capsule, or one that was taken already");
        return NULL;
    }
    void *form = PyCapsule_GetPointer(capsule, NAME[versioned]);
    if (versioned && !is_known(((Versioned *)form)->major)) return NULL;
    PyObject *holder, *learnt = learn(form, versioned, &holder);
    if (!learnt) return NULL;
    if (PyCapsule_SetName(capsule, USED[versioned]) < 0) {
        Py_DecRef(learnt);
        return NULL;
    }
    PyCapsule_SetDestructor(holder, holder_gone);
    return learnt;
}

static PyObject *take_object(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!has_arguments("take_object", count, 2)) return NULL;
    const Exchange *exchange = exchange_of(args[1]);
    Versioned *form = NULL;
    if (!exchange || refused(exchange->from_object(args[0], &form))) return NULL;
    PyObject *holder, *learnt = is_known(form->major) ? learn(form, 1, &holder) : NULL;
    if (!learnt) {
        if (form->deleter) form->deleter(form);
        return NULL;
    }
    PyCapsule_SetDestructor(holder, holder_gone);
    Device device = form->tensor.device;
    void *stream = NULL;
    if ((device.type == CUDA || device.type == CUDA_MANAGED) &&
        refused(exchange->current_stream(device.type, device.id, &stream))) {
        Py_DecRef(learnt);
        return NULL;
    }
    return Py_BuildValue("NK", learnt, (unsigned long long)(uintptr_t)stream);
}

static PyObject *going(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    interpreter_is_going = 1;
    return Py_BuildValue("");
}

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL
static PyMethodDef methods[] = {
    {"make", FAST(make),
     "make(owner, ptr, shape, type, device_type, device_id, read_only, versioned) -> capsule; a type is its code, "
     "bits << 8 and lanes << 16"},
    {"make_object", FAST(make_object),
     "make_object(owner, ptr, shape, type, device_type, device_id, table) -> the table's library's tensor"},
    {"take", take, METH_O,
     "take(capsule) -> (holder, ptr, shape, strides or None, type, (device_type, device_id), read_only)"},
    {"take_object", FAST(take_object),
     "take_object(tensor, table) -> (what take returns, the library's current stream on its device)"},
    {"going", going, METH_NOARGS, "The interpreter is about to go: from now on deleters leak."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_dlpack", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__dlpack(void) { return PyModule_Create(&definition); }
