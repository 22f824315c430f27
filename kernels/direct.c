// Launch a kernel with parameters kept in memory: direct.py's call of the driver, without ctypes.
//
// A launch copies the parameters, writes the new addresses into its copy, and lets other Python threads run while the
// driver works. So any threads may launch one kernel at once.

#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MOST_BYTES 4096  // CUDA's limit
#define MOST_PARAMETERS 256

typedef struct {
  unsigned sizes[7];  // of the grid and of a program, bytes of shared memory
  void *stream, *attributes;
  unsigned count;
} Config;  // CUlaunchConfig

typedef struct {
  int (*launch)(const Config*, void*, void**, void**);  // cuLaunchKernelEx
  void* function;
  const Config* config;
  const char* memory;  // of all parameters
  uint64_t bytes, parameters, addresses;
  uint64_t places[];  // of each parameter, in bytes; then of each address
} Plan;

// launch(plan, mask, stream, *addresses): return the driver's result, or -1 if an address has a bit of the mask.
static PyObject* launch(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const Plan* plan = count < 3 ? NULL : PyLong_AsVoidPtr(arguments[0]);
  if (!plan || (uint64_t)count != 3 + plan->addresses)
    return PyErr_Format(PyExc_TypeError, "the kernel takes other addresses than these %zd", count - 3);
  const uint64_t mask = PyLong_AsUnsignedLongLong(arguments[1]);
  Config config = *plan->config;
  config.stream = PyLong_AsVoidPtr(arguments[2]);
  char memory[MOST_BYTES] __attribute__((aligned(128)));
  void* parameters[MOST_PARAMETERS];
  memcpy(memory, plan->memory, plan->bytes);
  for (uint64_t i = 0; i < plan->parameters; ++i) parameters[i] = memory + plan->places[i];
  uint64_t bits = 0;
  for (uint64_t i = 0; i < plan->addresses; ++i) {
    const uint64_t address = PyLong_AsUnsignedLongLong(arguments[3 + i]);
    memcpy(memory + plan->places[plan->parameters + i], &address, sizeof address);
    bits |= address;
  }
  if (PyErr_Occurred()) return NULL;
  int result = -1;
  if (!(bits & mask)) {
    Py_BEGIN_ALLOW_THREADS;
    result = plan->launch(&config, plan->function, parameters, NULL);
    Py_END_ALLOW_THREADS;
  }
  return PyLong_FromLong(result);
}

static PyMethodDef methods[] = {{"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "groupbench_direct", NULL, -1, methods};

PyMODINIT_FUNC PyInit_groupbench_direct(void) { return PyModule_Create(&module); }
