/* A libnvidia-ml.so.1 without GPUs: what each call answers stands in the file that NVML_STUB_STATE names.
 *
 * One `key value` per line, read anew at every call, so that a test changes the machine while it is watched:
 *   gpus 8                    how many there are
 *   0.ecc_uncorrected 3       a reading of GPU 0
 *   0.error 15                every call about GPU 0 fails with this code
 *   0.nvmlDeviceGetName 999   this call about GPU 0 fails with this code
 *   nvmlInitWithFlags 18      so does this call about no GPU
 *   0.nvmlDeviceGetName hang  the call never returns; `crash`: it dereferences a null pointer; `exit`: it ends the process
 *   xid.0 0:79                the first Xid event: number 79 on GPU 0; xid.1 the second, ...
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SUCCESS 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define TIMEOUT 10

typedef int result;
typedef void *device;

static int text_of(const char *key, char *value, size_t size) {
    const char *path = getenv("NVML_STUB_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    int found = 0;
    if (!file) return 0;
    while (!found && fgets(line, sizeof line, file)) {
        size_t length = strlen(key);
        if (strncmp(line, key, length) == 0 && line[length] == ' ') {
            snprintf(value, size, "%s", line + length + 1);
            value[strcspn(value, "\n")] = 0;
            found = 1;
        }
    }
    fclose(file);
    return found;
}

static int index_of(device gpu) { return (int)(intptr_t)gpu - 1; }

static long long reading(device gpu, const char *name, long long otherwise) {
    char key[128], value[128];
    if (gpu) snprintf(key, sizeof key, "%d.%s", index_of(gpu), name);
    else snprintf(key, sizeof key, "%s", name);
    return text_of(key, value, sizeof value) ? atoll(value) : otherwise;
}

static result enter(device gpu, const char *call) {
    char key[128], value[128];
    if (gpu) snprintf(key, sizeof key, "%d.%s", index_of(gpu), call);
    else snprintf(key, sizeof key, "%s", call);
    if (text_of(key, value, sizeof value)) {
        if (strcmp(value, "hang") == 0) for (;;) pause();
        if (strcmp(value, "crash") == 0) *(volatile int *)0 = 1;
        if (strcmp(value, "exit") == 0) _exit(3);
        return atoi(value);
    }
    return gpu ? (result)reading(gpu, "error", SUCCESS) : SUCCESS;
}

#define ENTER(gpu) do { result bad = enter(gpu, __func__); if (bad) return bad; } while (0)
#define NUMBER(call, type, name, otherwise) \
    result call(device gpu, type *value) { ENTER(gpu); *value = (type)reading(gpu, name, otherwise); return SUCCESS; }

static result text(char *out, unsigned size, device gpu, const char *name, const char *otherwise) {
    char key[128];
    if (gpu) snprintf(key, sizeof key, "%d.%s", index_of(gpu), name);
    else snprintf(key, sizeof key, "%s", name);
    if (!text_of(key, out, size)) snprintf(out, size, "%s", otherwise);
    return SUCCESS;
}

result nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(NULL); return SUCCESS; }
result nvmlInit_v2(void) { ENTER(NULL); return SUCCESS; }
result nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(result code) { (void)code; return "an error of the stub"; }
result nvmlSystemGetDriverVersion(char *out, unsigned size) { ENTER(NULL); return text(out, size, NULL, "driver", "575.57.08"); }
result nvmlSystemGetNVMLVersion(char *out, unsigned size) { ENTER(NULL); return text(out, size, NULL, "nvml", "12.575.57.08"); }
result nvmlSystemGetCudaDriverVersion(int *out) { ENTER(NULL); *out = (int)reading(NULL, "cuda", 12090); return SUCCESS; }
result nvmlDeviceGetCount_v2(unsigned *out) { ENTER(NULL); *out = (unsigned)reading(NULL, "gpus", 0); return SUCCESS; }

result nvmlDeviceGetHandleByIndex_v2(unsigned index, device *out) {
    *out = (device)(intptr_t)(index + 1);
    if (index >= reading(NULL, "gpus", 0)) return INVALID_ARGUMENT;
    ENTER(*out);
    return SUCCESS;
}
result nvmlDeviceGetIndex(device gpu, unsigned *out) { *out = (unsigned)index_of(gpu); return SUCCESS; }
result nvmlDeviceGetName(device gpu, char *out, unsigned size) { ENTER(gpu); return text(out, size, gpu, "name", "NVIDIA H100 80GB HBM3"); }
result nvmlDeviceGetUUID(device gpu, char *out, unsigned size) {
    ENTER(gpu);
    snprintf(out, size, "GPU-00000000-0000-0000-0000-00000000000%d", index_of(gpu));
    return SUCCESS;
}

/* GPU i is divided where `i.mig` is 1; its one instance is then GPU 100+i. */
result nvmlDeviceGetMigMode(device gpu, unsigned *current, unsigned *pending) {
    ENTER(gpu);
    *current = *pending = (unsigned)reading(gpu, "mig", 0);
    return SUCCESS;
}
result nvmlDeviceGetHandleByUUID(const char *uuid, device *out) {
    int gpu;
    ENTER(NULL);
    if (sscanf(uuid, "MIG-00000000-0000-0000-0000-%d", &gpu) != 1) return NOT_FOUND;
    *out = (device)(intptr_t)(100 + gpu + 1);
    return SUCCESS;
}
result nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device mig, device *out) {
    *out = (device)((intptr_t)mig - 100);
    return SUCCESS;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
result nvmlDeviceGetPciInfo_v3(device gpu, struct pci *out) {
    ENTER(gpu);
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", 0x3b + index_of(gpu));
    return SUCCESS;
}

result nvmlDeviceGetEccMode(device gpu, int *current, int *pending) {
    ENTER(gpu);
    *current = (int)reading(gpu, "ecc", 1);
    *pending = (int)reading(gpu, "ecc_pending", *current);
    return SUCCESS;
}
NUMBER(nvmlDeviceGetDefaultEccMode, int, "ecc_default", 1)
result nvmlDeviceGetTotalEccErrors(device gpu, int kind, int since, unsigned long long *out) {
    ENTER(gpu);
    *out = (unsigned long long)reading(gpu, kind == 0 ? "ecc_corrected" : since == 0 ? "ecc_uncorrected" : "ecc_uncorrected_ever", 0);
    return SUCCESS;
}
result nvmlDeviceGetRemappedRows(device gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ENTER(gpu);
    *corrected = (unsigned)reading(gpu, "rows_corrected", 0);
    *uncorrected = (unsigned)reading(gpu, "rows_uncorrected", 0);
    *pending = (unsigned)reading(gpu, "remap_pending", 0);
    *failed = (unsigned)reading(gpu, "remap_failure", 0);
    return SUCCESS;
}
result nvmlDeviceGetRetiredPages(device gpu, int cause, unsigned *count, unsigned long long *pages) {
    unsigned there;
    ENTER(gpu);
    if (reading(gpu, "retired_single", -1) < 0) return NOT_SUPPORTED;
    there = (unsigned)reading(gpu, cause == 0 ? "retired_single" : "retired_double", 0);
    if (!pages || *count < there) { *count = there; return there ? INSUFFICIENT_SIZE : SUCCESS; }
    for (*count = 0; *count < there; ++*count) pages[*count] = *count;
    return SUCCESS;
}
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, int, "retired_pending", 0)
result nvmlDeviceValidateInforom(device gpu) { ENTER(gpu); return SUCCESS; }

NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle", 1)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle", 1)
result nvmlDeviceGetTemperature(device gpu, int sensor, unsigned *out) {
    (void)sensor;
    ENTER(gpu);
    *out = (unsigned)reading(gpu, "temperature", 40);
    return SUCCESS;
}
result nvmlDeviceGetTemperatureThreshold(device gpu, int kind, unsigned *out) {
    ENTER(gpu);
    *out = kind == 0 ? 92 : kind == 1 ? 89 : 95;
    return SUCCESS;
}
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power_mw", 70000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit_mw", 700000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power_default_mw", 700000)

struct memory { unsigned version; unsigned long long total, reserved, free, used; };
result nvmlDeviceGetMemoryInfo_v2(device gpu, struct memory *out) {
    ENTER(gpu);
    out->total = 80ull << 30;
    out->reserved = 600ull << 20;
    out->used = (unsigned long long)reading(gpu, "memory_used_mib", 4) << 20;
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}
struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };
result nvmlDeviceGetComputeRunningProcesses_v3(device gpu, unsigned *count, struct process *out) {
    unsigned room = *count;
    long long pid;
    ENTER(gpu);
    pid = reading(gpu, "process", 0);
    *count = pid ? 1 : 0;
    if (pid && room < 1) return INSUFFICIENT_SIZE;
    if (pid) *out = (struct process){(unsigned)pid, (unsigned long long)reading(gpu, "memory_used_mib", 4) << 20, -1u, -1u};
    return SUCCESS;
}

NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie_max_width", 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie_generation", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie_max_generation", 5)

result nvmlDeviceGetNvLinkState(device gpu, unsigned link, int *active) {
    char name[32];
    ENTER(gpu);
    snprintf(name, sizeof name, "link_down.%u", link);
    *active = !reading(gpu, name, 0);
    return SUCCESS;
}
struct field { uint32_t id, scope; int64_t timestamp, latency; int type; result code; union { double d; unsigned u; unsigned long long ull; } value; };
result nvmlDeviceGetFieldValues(device gpu, int count, struct field *fields) {
    ENTER(gpu);
    for (int i = 0; i < count; i++) {
        struct field *field = &fields[i];
        char name[32];
        long long value;
        snprintf(name, sizeof name, "field.%u", field->id);
        value = reading(gpu, name, field->id == 91 ? 18 : field->id == 230 ? 0 : -1);
        field->code = value < 0 ? NOT_SUPPORTED : SUCCESS;
        field->type = field->id == 91 || field->id == 230 ? 1 : 3;
        if (field->type == 1) field->value.u = (unsigned)value;
        else field->value.ull = (unsigned long long)value;
    }
    return SUCCESS;
}
struct fabric { unsigned version; unsigned char cluster[16]; result status; uint32_t clique; unsigned char state; uint32_t health; };
result nvmlDeviceGetGpuFabricInfoV(device gpu, struct fabric *out) {
    ENTER(gpu);
    out->status = (result)reading(gpu, "fabric_status", 0);
    out->state = (unsigned char)reading(gpu, "fabric", 3);
    return SUCCESS;
}

struct event { device gpu; unsigned long long type, data; unsigned gpu_instance, compute_instance; };
result nvmlEventSetCreate(void **set) { ENTER(NULL); *set = malloc(1); return SUCCESS; }
static unsigned long long registered;  /* a bit for each GPU */
result nvmlDeviceRegisterEvents(device gpu, unsigned long long types, void *set) {
    (void)types; (void)set;
    ENTER(gpu);
    registered |= 1ull << ((intptr_t)gpu - 1);
    return SUCCESS;
}
result nvmlEventSetFree(void *set) { free(set); return SUCCESS; }
result nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout_ms) {
    static int delivered;
    (void)set;
    ENTER(NULL);
    for (unsigned waited = 0;; waited += 10) {
        char key[32], value[64];
        int gpu, number;
        snprintf(key, sizeof key, "xid.%d", delivered);
        if (text_of(key, value, sizeof value) && sscanf(value, "%d:%d", &gpu, &number) == 2) {
            delivered++;
            if (!(registered >> gpu & 1)) continue;
            *out = (struct event){(device)(intptr_t)(gpu + 1), 8, (unsigned long long)number, -1u, -1u};
            return SUCCESS;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
}
