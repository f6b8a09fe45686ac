// GCC's libstdc++ takes the seeds of std::random_device from arc4random where it was built with a glibc
// that has it, 2.36 or newer. Where libstdc++ is linked into our libraries, as in a wheel, it finds this
// one.

#include <sys/random.h>

extern "C" __attribute__((visibility("hidden"))) unsigned arc4random() {
    unsigned value = 0;
    while (getrandom(&value, sizeof(value), 0) != sizeof(value)) {
    }
    return value;
}
