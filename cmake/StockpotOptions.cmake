# How everything of ours is compiled.
option(STOCKPOT_TESTS "Build the tests and benches" ON)
option(STOCKPOT_CUDA "Compile the CUDA backend where a toolkit is found" ON)
set(STOCKPOT_SANITIZE "" CACHE STRING "address;undefined, or thread, or empty")
option(STOCKPOT_FUZZ "Build the fuzzers and what they test, and nothing else (clang; preset fuzz)" OFF)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

# All programs stand beside each other, so that `stockpot serve` finds the daemon.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

find_program(STOCKPOT_CCACHE ccache)
if(STOCKPOT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${STOCKPOT_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${STOCKPOT_CCACHE})
endif()
find_program(STOCKPOT_LLD ld.lld)
if(STOCKPOT_LLD)
  add_link_options($<$<LINK_LANGUAGE:CXX>:-fuse-ld=lld>)
endif()

if(STOCKPOT_SANITIZE)
  string(REPLACE ";" "," stockpot_sanitizers "${STOCKPOT_SANITIZE}")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${stockpot_sanitizers}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>)
  add_link_options($<$<LINK_LANGUAGE:CXX>:-fsanitize=${stockpot_sanitizers}>)
endif()

if(STOCKPOT_FUZZ)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include ${PROJECT_SOURCE_DIR}/tests/fuzz/half.h>")
endif()

# stockpot_module(NAME source...): a static library with our warnings, includable from the root.
function(stockpot_module name)
  add_library(${name} STATIC ${ARGN})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow
                         -Wno-missing-field-initializers>)
endfunction()

# stockpot_program(NAME source...): a program, likewise.
function(stockpot_program name)
  add_executable(${name} ${ARGN})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow
                         -Wno-missing-field-initializers>)
endfunction()
