#include "lanes.c"
