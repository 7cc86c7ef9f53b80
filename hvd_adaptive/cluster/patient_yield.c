/* Where ranks have few cores, a thread of MPI or Horovod that waits sleeps (hvd_adaptive/cluster/patience.py).
 *
 * Both wait by asking and calling sched_yield in turns. That is as busy as computing: it takes a core from the ranks' own work, and
 * under a CPU quota it uses up what they could have had. On Linux 6.18 threads that yield in turns have also kept the kernel's own
 * threads from running for a minute.
 *
 * make_patient() puts patient_yield in the place of the libraries' sched_yield. Preloaded (LD_PRELOAD), this file does it for every
 * process, also for one that does not import hvd_adaptive.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define IS_CALL(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_CALL(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#define IS_CALL(type) 0
#endif

/* Other callers, such as OpenMP's barriers, yield between two steps of one computation. */
static int waits_for_ranks(const char *file) {
    static const char *const prefixes[] = {"libmpi", "libopen-pal", "mpi_lib"};
    const char *slash = strrchr(file, '/');
    const char *name = slash ? slash + 1 : file;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (!strncmp(name, prefixes[i], strlen(prefixes[i]))) return 1;
    return 0;
}

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static int patient_yield(void) {
    static __thread long begin_ns, end_ns;
    long now = now_ns();
    /* Who was away for longer did something else: a new wait begins. */
    if (now - end_ns > 20000) begin_ns = now;
    long waited_ns = now - begin_ns;
    if (waited_ns < 10000) {
        syscall(SYS_sched_yield);
    } else {
        /* At most an eighth late, and rarely awake where it takes long. The kernel adds 50 us. */
        long ns = waited_ns / 8;
        struct timespec pause = {0, ns < 20000 ? 20000 : ns > 300000 ? 300000 : ns};
        nanosleep(&pause, 0);
    }
    end_ns = now_ns();
    return 0;
}

int sched_yield(void) {
    static __thread const void *known_caller;
    static __thread int sleeps;
    const void *caller = __builtin_return_address(0);
    if (caller != known_caller) {
        Dl_info info;
        sleeps = dladdr(caller, &info) && info.dli_fname && waits_for_ranks(info.dli_fname);
        known_caller = caller;
    }
    return sleeps ? patient_yield() : (int)syscall(SYS_sched_yield);
}

/* Puts patient_yield where a library's calls find sched_yield; counts them. */
static int replace_calls(struct dl_phdr_info *info, size_t size, void *count) {
    (void)size;
    if (!info->dlpi_name || !waits_for_ranks(info->dlpi_name)) return 0;
    const ElfW(Dyn) *dynamic = 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) dynamic = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    const ElfW(Rela) *tables[2] = {0, 0};
    size_t sizes[2] = {0, 0};
    const ElfW(Sym) *symbols = 0;
    const char *names = 0;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        const void *at = (const void *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_JMPREL) tables[0] = at;
        if (dynamic->d_tag == DT_PLTRELSZ) sizes[0] = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_RELA) tables[1] = at;
        if (dynamic->d_tag == DT_RELASZ) sizes[1] = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_SYMTAB) symbols = at;
        if (dynamic->d_tag == DT_STRTAB) names = at;
    }
    for (int t = 0; t < 2 && symbols && names; t++)
        for (size_t i = 0; tables[t] && i < sizes[t] / sizeof *tables[t]; i++) {
            const ElfW(Rela) *entry = &tables[t][i];
            if (!IS_CALL(ELF64_R_TYPE(entry->r_info))) continue;
            if (strcmp(names + symbols[ELF64_R_SYM(entry->r_info)].st_name, "sched_yield")) continue;
            void **slot = (void **)(info->dlpi_addr + entry->r_offset);
            /* It may be read-only by now; its page is then written and left writable. */
            size_t page = (size_t)sysconf(_SC_PAGESIZE);
            if (mprotect((void *)((size_t)slot & ~(page - 1)), page, PROT_READ | PROT_WRITE)) continue;
            *slot = (void *)patient_yield;
            ++*(int *)count;
        }
    return 0;
}

/* Has the libraries of MPI and Horovod that are loaded sleep where they yield; returns in how many places. */
int make_patient(void) {
    int count = 0;
    dl_iterate_phdr(replace_calls, &count);
    return count;
}
