/* Loaded into all that tests start (scripts/test.sh): who gives up a turn sleeps a little.
 *
 * Ranks that wait do nothing else, and on Linux 6.18 a yielding thread loses more than its turn: with two jobs of ranks on two cores
 * the kernel's own threads, the network's among them, have not run for a minute. Asleep, they also leave the cores to others.
 */
#include <time.h>

int sched_yield(void) {
    struct timespec pause = {0, 50 * 1000};
    nanosleep(&pause, 0);
    return 0;
}
