// Records the NVIDIA ioctls of a program that runs without gpuslice: one JSON object a line.
//
//   gcc -shared -fPIC -O1 -o record.so record.c -ldl
//   RECORD=/tmp/trace LD_PRELOAD=./record.so PROGRAM     writes /tmp/trace.PID.jsonl
//
// {"seq":1,"pid":7,"file":3,"node":"ctl","cmd":"0xc030462b","ret":0,"errno":0,"in":"hex","out":"hex",
//  "links":[{"at":16,"in":"hex","out":"hex","links":[...]}]}
// {"open":3,"pid":7,"node":"gpu0"} and {"close":3,"pid":7}
//
// A link is a buffer behind a pointer field: `at` is the field's offset in the buffer it stands in. Sizes that
// no command carries (allocation classes, UVM) come from record_sizes.h, driver 580.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "record_sizes.h"

static int (*next_ioctl)(int, unsigned long, ...);
static int (*next_close)(int);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *out;
static int out_pid;
static unsigned seq;
static char known[4096];

static const char *node_of(int fd, char *name) {
    char link[64], path[128];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return NULL;
    path[n] = 0;
    if (strncmp(path, "/dev/nvidia", 11)) return NULL;
    if (!strcmp(path, "/dev/nvidiactl")) return "ctl";
    if (!strcmp(path, "/dev/nvidia-uvm")) return "uvm";
    if (!strcmp(path, "/dev/nvidia-uvm-tools")) return "uvm-tools";
    snprintf(name, 128, "gpu%s", path + 11);
    return name;
}

static void ready(void) {
    if (!next_ioctl) next_ioctl = dlsym(RTLD_NEXT, "ioctl");
    if (!next_close) next_close = dlsym(RTLD_NEXT, "close");
    if (out && out_pid == getpid()) return;
    char path[256];
    const char *base = getenv("RECORD");
    snprintf(path, sizeof path, "%s.%d.jsonl", base ? base : "/tmp/trace", getpid());
    out = fopen(path, "ae");
    out_pid = getpid();
    memset(known, 0, sizeof known);
}

static void hex(const char *key, const unsigned char *p, size_t n) {
    static const char digit[] = "0123456789abcdef";
    fprintf(out, "\"%s\":\"", key);
    for (size_t i = 0; i < n; i++) {
        putc(digit[p[i] >> 4], out);
        putc(digit[p[i] & 15], out);
    }
    putc('"', out);
}

struct buffer { unsigned at; unsigned char *address; size_t size; unsigned char *before; };

static unsigned char *copy(const unsigned char *p, size_t n) {
    unsigned char *c = malloc(n ? n : 1);
    if (c && n) memcpy(c, p, n);
    return c;
}

static uint32_t u32(const unsigned char *p, unsigned at) { uint32_t v; memcpy(&v, p + at, 4); return v; }
static uint64_t u64(const unsigned char *p, unsigned at) { uint64_t v; memcpy(&v, p + at, 8); return v; }

static size_t class_size(uint32_t id) {
    for (size_t i = 0; i < sizeof class_sizes / sizeof *class_sizes; i++)
        if (class_sizes[i].id == id) return class_sizes[i].size;
    return 0;
}

int ioctl(int fd, unsigned long cmd, ...) {
    va_list ap;
    va_start(ap, cmd);
    unsigned char *arg = va_arg(ap, void *);
    va_end(ap);
    pthread_mutex_lock(&lock);
    ready();
    pthread_mutex_unlock(&lock);
    char name[128];
    const char *node = node_of(fd, name);
    if (!node) return next_ioctl(fd, cmd, arg);

    unsigned nr = _IOC_NR(cmd);
    size_t size = _IOC_SIZE(cmd);
    struct buffer first = {0}, inner[4] = {{0}};
    int inners = 0;
    if (!strncmp(node, "uvm", 3)) {
        size = 0;
        for (size_t i = 0; i < sizeof uvm_sizes / sizeof *uvm_sizes; i++)
            if (uvm_sizes[i].cmd == (uint32_t)cmd) size = uvm_sizes[i].size;
    } else if (nr == 0x2a && size == 32) {
        first = (struct buffer){16, (void *)u64(arg, 16), u32(arg, 24), 0};
    } else if (nr == 0x2b && (size == 48 || size == 32)) {
        first = (struct buffer){16, (void *)u64(arg, 16), class_size(u32(arg, 12)), 0};
    }
    if (!first.address) first.size = 0;
    if (nr == 0x2a && first.size) {
        uint32_t control = u32(arg, 8);
        for (size_t i = 0; i < sizeof pointers / sizeof *pointers && inners < 4; i++) {
            if (pointers[i].cmd != control || pointers[i].at + 8 > first.size) continue;
            void *p = (void *)u64(first.address, pointers[i].at);
            if (p) inner[inners++] = (struct buffer){pointers[i].at, p,
                (size_t)u32(first.address, pointers[i].count_at) * pointers[i].element, 0};
        }
    }
    unsigned char *before = copy(arg, size);
    first.before = copy(first.address, first.size);
    for (int i = 0; i < inners; i++) inner[i].before = copy(inner[i].address, inner[i].size);

    int ret = next_ioctl(fd, cmd, arg);
    int error = errno;

    pthread_mutex_lock(&lock);
    if (fd < (int)sizeof known && !known[fd]) {
        known[fd] = 1;
        fprintf(out, "{\"open\":%d,\"pid\":%d,\"node\":\"%s\"}\n", fd, getpid(), node);
    }
    fprintf(out, "{\"seq\":%u,\"pid\":%d,\"file\":%d,\"node\":\"%s\",\"cmd\":\"0x%x\",\"ret\":%d,\"errno\":%d,",
            seq++, getpid(), fd, node, (unsigned)cmd, ret, ret < 0 ? error : 0);
    hex("in", before, size); putc(',', out); hex("out", arg, size);
    if (first.size) {
        fprintf(out, ",\"links\":[{\"at\":%u,", first.at);
        hex("in", first.before, first.size); putc(',', out); hex("out", first.address, first.size);
        if (inners) {
            fprintf(out, ",\"links\":[");
            for (int i = 0; i < inners; i++) {
                fprintf(out, "%s{\"at\":%u,", i ? "," : "", inner[i].at);
                hex("in", inner[i].before, inner[i].size); putc(',', out);
                hex("out", inner[i].address, inner[i].size); putc('}', out);
            }
            putc(']', out);
        }
        fprintf(out, "}]");
    }
    fprintf(out, "}\n");
    fflush(out);
    pthread_mutex_unlock(&lock);
    free(before); free(first.before);
    for (int i = 0; i < inners; i++) free(inner[i].before);
    errno = error;
    return ret;
}

int close(int fd) {
    pthread_mutex_lock(&lock);
    ready();
    if (fd >= 0 && fd < (int)sizeof known && known[fd] && out_pid == getpid()) {
        known[fd] = 0;
        fprintf(out, "{\"close\":%d,\"pid\":%d}\n", fd, getpid());
    }
    pthread_mutex_unlock(&lock);
    return next_close(fd);
}
