// Implements arc4random. GCC's libstdc++ seeds std::random_device with arc4random if it was built with glibc 2.36 or
// newer. If libstdc++ is linked statically into our libraries, as in a wheel, it uses this function instead of glibc's.

#include <sys/random.h>

extern "C" __attribute__((visibility("hidden"))) unsigned arc4random() {
    unsigned value = 0;
    while (getrandom(&value, sizeof(value), 0) != sizeof(value)) {
    }
    return value;
}
