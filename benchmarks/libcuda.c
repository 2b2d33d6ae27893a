/* What Triton's launcher calls of CUDA's driver, and nothing behind it: a launch ends where a GPU
   would begin. benchmarks/stand_in.py compiles it. Every function returns 0, for success. */
#include <stdint.h>

typedef uint64_t Address;

static long launched = 0;

/* Of the program that counts: launches so far. */
long stand_in_launches(void) { return launched; }

int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
    ++launched;
    return 0;
}

/* An H100's answers, by number of CUdevice_attribute. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 10: *value = 32; break;      /* warp size */
        case 16: *value = 132; break;     /* multiprocessors */
        case 75: *value = 9; break;       /* compute capability, major */
        case 76: *value = 0; break;       /* minor */
        case 82: *value = 65536; break;   /* registers of a multiprocessor */
        case 97: *value = 232448; break;  /* shared memory that a block may ask for */
        default: *value = 1024;
    }
    return 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : 32; /* most threads of a block, and registers */
    return 0;
}

int cuPointerGetAttribute(void *found, int attribute, Address pointer) {
    *(Address *)found = pointer; /* the same address on the device */
    return 0;
}

int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(Address *value, int limit) { *value = 0; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "of a stand-in"; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)0x1000; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)0x2000;
    return 0;
}
int cuOccupancyMaxActiveClusters(int *count, void *function, void *config) {
    *count = 1;
    return 0;
}
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }

int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxSetLimit(int limit, Address value) { return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuInit(unsigned flags) { return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuPointerGetAttributes(unsigned count, int *attributes, void **found, Address pointer) {
    return 0;
}
int cuTensorMapEncodeIm2col(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
