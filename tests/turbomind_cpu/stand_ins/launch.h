// A kernel launch as the stand-in CUDA runtime hands it to a CPU kernel, and how anything unknown ends the run.
#pragma once
#include <unistd.h>

#include <cstdio>
#include <cstring>

struct dim3 {
    unsigned x, y, z;
};

struct Launch {
    const char* name;  // mangled
    dim3 grid;
    void** args;  // args[i] points at parameter i

    template <class T>
    T arg(int i) const {
        T value;
        std::memcpy(&value, args[i], sizeof value);
        return value;
    }
};

using Kernel = void (*)(const Launch&);

constexpr int kRefused = 70;  // EX_SOFTWARE

// Nothing is ever guessed: a wrong answer would look like a right one.
[[noreturn]] inline void refuse(const char* what, const char* which) {
    std::fprintf(stderr, "turbomind_cpu: %s: %s\n", what, which);
    std::fflush(stderr);
    _exit(kRefused);
}

inline void require(bool holds, const char* what, const char* which) {
    if (!holds) {
        refuse(what, which);
    }
}

// The CPU version of a kernel, or null. Lives in the stand-in cuBLAS; the stand-in runtime sees it through a weak
// symbol.
extern "C" Kernel turbomind_cpu_kernel(const char* name);

// Makes an extern "C" function stand for the engine's own of that symbol, which it calls through its PLT.
#define INSTEAD_OF(symbol, function) asm(".globl " symbol "\n.type " symbol ", @function\n.set " symbol ", " #function);
