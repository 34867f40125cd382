/* Sharing a job among the OpenMP threads that PyTorch already has, and memory that a thread keeps between calls.
 *
 * A second pool would fight with the first one for the cores: libgomp's threads spin for milliseconds after each region.
 * Its functions are found in the process when this library is loaded; without them one thread does everything. macOS has a
 * pool for all libraries of a process; OpenMP, where it is found there, says how many threads are wanted.
 */
#ifndef EDKM_THREADS
#define EDKM_THREADS

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

/* The OpenMP runtime that is in the process already, if any (libgomp's interface; LLVM's and Intel's have it too). */
#ifdef __linux__
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
extern int omp_in_parallel(void) __attribute__((weak));
extern int omp_get_max_threads(void) __attribute__((weak));
#define HAS_THREADS (GOMP_parallel && omp_get_thread_num && omp_get_num_threads && omp_in_parallel && omp_get_max_threads)
#elif defined(__APPLE__)
#include <dispatch/dispatch.h>
#include <dlfcn.h>
#include <unistd.h>
#endif

static int forked; /* a child has none of its parent's threads, and libgomp waits for them forever */
static void in_child(void) { forked = 1; }
static pthread_key_t scratch_key;
__attribute__((constructor)) static void prepare_threads(void) {
    pthread_atfork(NULL, NULL, in_child);
    pthread_key_create(&scratch_key, free);
}

/* A job cut into units; the cut, and so the result, does not depend on who does them. */
typedef struct {
    void (*work)(const void *job, int64_t first, int64_t last);
    const void *job;
    int64_t units, pieces;
} Shared;

static inline void do_piece(const Shared *shared, int64_t piece, int64_t pieces) {
    shared->work(shared->job, shared->units * piece / pieces, shared->units * (piece + 1) / pieces);
}

#ifdef __linux__
static void of_thread(void *shared) { do_piece(shared, omp_get_thread_num(), omp_get_num_threads()); }
#elif defined(__APPLE__)
static void of_piece(void *shared, size_t piece) { do_piece(shared, (int64_t)piece, ((const Shared *)shared)->pieces); }

static int64_t threads_wanted(void) {
    int (*most)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    return most ? most() : sysconf(_SC_NPROCESSORS_ONLN);
}
#endif

/* `many`: whether there is enough to do for all threads, as many as `torch.set_num_threads` says. */
static inline void share(void (*work)(const void *, int64_t, int64_t), const void *job, int64_t units, int many) {
#ifdef __linux__
    int threads = HAS_THREADS && many ? omp_get_max_threads() : 1;
    if (threads > 1 && units > 1 && !forked && !omp_in_parallel()) {
        Shared shared = {work, job, units, threads};
        GOMP_parallel(of_thread, &shared, (unsigned)threads, 0);
        return;
    }
#elif defined(__APPLE__)
    int64_t pieces = many && units > 1 && !forked ? threads_wanted() : 1;
    if (pieces > 1) {
        Shared shared = {work, job, units, pieces};
        dispatch_apply_f((size_t)pieces, DISPATCH_APPLY_AUTO, &shared, of_piece);
        return;
    }
#endif
    work(job, 0, units);
}

/* A thread's scratch memory, kept from call to call: fresh pages would cost more than small products. Its size is before it.
 * Each file that includes this has its own. */
static inline float *scratch(size_t floats) {
    size_t bytes = floats * sizeof(float);
    size_t *kept = pthread_getspecific(scratch_key);
    if (!kept || *kept < bytes) {
        free(kept);
        pthread_setspecific(scratch_key, NULL);
        if (posix_memalign((void **)&kept, 64, 64 + bytes)) return NULL;
        *kept = bytes;
        pthread_setspecific(scratch_key, kept);
    }
    return (float *)((char *)kept + 64);
}

#endif
