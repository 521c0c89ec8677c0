/* DLPack capsules, made and taken.
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

enum { MAJOR = 1, MINOR = 0, MOST_DIMENSIONS = 64 };
enum { READ_ONLY = 1 };

static const char *const NAME[] = {"dltensor", "dltensor_versioned"};
static const char *const USED[] = {"used_dltensor", "used_dltensor_versioned"};
static const char *const HELD[] = {"memferry.dltensor", "memferry.dltensor_versioned"};

static int interpreter_is_going;

/* ---- made here ---------------------------------------------------------------------------------------------- */

/* What one export consists of: both forms begin with what their deleter gets. */
typedef struct {
    union {
        Unversioned unversioned;
        Versioned versioned;
    } form;
    PyObject *owner;
    int64_t numbers[2 * MOST_DIMENSIONS];
} Export;

static void drop(Export *export) {
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

static int read_numbers(PyObject *tuple, int64_t *out) {
    Py_ssize_t count = PyTuple_Size(tuple);
    if (count < 0) return -1;
    if (count > MOST_DIMENSIONS) {
        PyErr_SetString(PyExc_ValueError, "more than 64 dimensions");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (out[i] == -1 && PyErr_Occurred()) return -1;
    }
    return (int)count;
}

static PyObject *make(PyObject *module, PyObject *args) {
    PyObject *owner, *shape, *strides;
    unsigned long long ptr;
    int code, bits, type, id, read_only, versioned;
    (void)module;
    if (!PyArg_ParseTuple(args, "OKO!O!(ii)(ii)pp", &owner, &ptr, &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                          &code, &bits, &type, &id, &read_only, &versioned))
        return NULL;
    Export *export = calloc(1, sizeof *export);
    if (!export) return PyErr_NoMemory();
    int ndim = read_numbers(shape, export->numbers);
    if (ndim < 0 || read_numbers(strides, export->numbers + MOST_DIMENSIONS) < 0) {
        free(export);
        return NULL;
    }
    Tensor tensor = {
        .data = (void *)(uintptr_t)ptr,
        .device = {type, id},
        .ndim = ndim,
        .dtype = {(uint8_t)code, (uint8_t)bits, 1},
        .shape = export->numbers,
        .strides = export->numbers + MOST_DIMENSIONS,
    };
    if (versioned)
        export->form.versioned = (Versioned){.major = MAJOR,
                                             .minor = MINOR,
                                             .context = export,
                                             .deleter = drop_versioned,
                                             .flags = read_only ? READ_ONLY : 0,
                                             .tensor = tensor};
    else
        export->form.unversioned = (Unversioned){.tensor = tensor, .context = export, .deleter = drop_unversioned};
    PyObject *capsule = PyCapsule_New(&export->form, NAME[versioned], capsule_gone);
    if (!capsule) {
        free(export);
        return NULL;
    }
    Py_IncRef(owner);
    export->owner = owner;
    return capsule;
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

static PyObject *take(PyObject *module, PyObject *capsule) {
    (void)module;
    int versioned = PyCapsule_IsValid(capsule, NAME[1]);
    if (!versioned && !PyCapsule_IsValid(capsule, NAME[0])) {
        PyErr_SetString(PyExc_ValueError, "not a DLPack capsule, or one that was taken already");
        return NULL;
    }
    void *form = PyCapsule_GetPointer(capsule, NAME[versioned]);
    if (versioned && ((Versioned *)form)->major != MAJOR) {
        PyErr_Format(PyExc_BufferError, "DLPack version %u is not supported, only 1", ((Versioned *)form)->major);
        return NULL;
    }
    const Tensor *tensor = versioned ? &((Versioned *)form)->tensor : &((Unversioned *)form)->tensor;
    int read_only = versioned && (((Versioned *)form)->flags & READ_ONLY);
    PyObject *shape = numbers(tensor->shape, tensor->ndim);
    PyObject *strides = tensor->strides ? numbers(tensor->strides, tensor->ndim) : Py_BuildValue("");
    PyObject *holder = PyCapsule_New(form, HELD[versioned], NULL);
    if (!shape || !strides || !holder || PyCapsule_SetName(capsule, USED[versioned]) < 0) {
        Py_DecRef(shape);
        Py_DecRef(strides);
        Py_DecRef(holder);
        return NULL;
    }
    PyCapsule_SetDestructor(holder, holder_gone);
    unsigned long long ptr = (unsigned long long)(uintptr_t)tensor->data + tensor->byte_offset;
    return Py_BuildValue("NKNN(iii)(ii)O", holder, ptr, shape, strides, tensor->dtype.code, tensor->dtype.bits,
                         tensor->dtype.lanes, tensor->device.type, tensor->device.id,
                         read_only ? Py_True : Py_False);
}

static PyObject *going(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    interpreter_is_going = 1;
    return Py_BuildValue("");
}

static PyMethodDef methods[] = {
    {"make", make, METH_VARARGS,
     "make(owner, ptr, shape, strides, (code, bits), (device_type, device_id), read_only, versioned) -> capsule"},
    {"take", take, METH_O,
     "take(capsule) -> (holder, ptr, shape, strides or None, (code, bits, lanes), (device_type, device_id), read_only)"},
    {"going", going, METH_NOARGS, "The interpreter is about to go: from now on deleters leak."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_dlpack", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__dlpack(void) { return PyModule_Create(&definition); }
