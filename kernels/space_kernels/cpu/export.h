// The exported names: space_<name>_<kind>.

#pragma once

#include "isa.h"

#define JOINED(a, b) a##_##b
#define NAMED(a, b) JOINED(a, b)
#define EXPORT(name) __attribute__((visibility("default"))) NAMED(space_##name, KIND)
