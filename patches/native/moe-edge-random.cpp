// Implements arc4random for a libstdc++ that is linked statically into our libraries, as in a wheel. If it was built
// with glibc 2.36 or newer, libstdc++ calls arc4random to seed std::random_device. Older versions of glibc lack this
// function.

#include <sys/random.h>

extern "C" __attribute__((visibility("hidden"))) unsigned arc4random() {
    unsigned value = 0;
    while (getrandom(&value, sizeof(value), 0) != sizeof(value)) {
    }
    return value;
}
