# Included by CMake right after Horovod's project() call, so that Horovod's files stay as they are.

# Horovod asks for C++14; PyTorch's headers need C++17.
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++17")
set(CMAKE_CXX14_EXTENSION_COMPILE_OPTION "-std=gnu++17")

# The wheel is cached and used in other environments: paths relative to the library, not to this environment.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ENV{HVD_ADAPTIVE_RPATH}")
# As RPATH, not RUNPATH: LD_LIBRARY_PATH must not bring in a second MPI.
string(APPEND CMAKE_SHARED_LINKER_FLAGS " -Wl,--disable-new-dtags")
