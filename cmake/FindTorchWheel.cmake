# LibTorch from PyPI's `torch` wheel, as the imported target stockpot::torch.
#
# The wheel's own TorchConfig.cmake insists on a CUDA toolkit of its version when the wheel is a CUDA
# build (PyPI's is). Ours needs only the CPU half: headers, libtorch_cpu and libc10, which run on a
# machine without CUDA. STOCKPOT_PYTHON names the interpreter that has torch (cmake/setup.sh).
# The environment variable of that name wins over the cache: the setup scripts set it, and a build
# folder follows when requirements.txt, and with it the environment, changes.
set(STOCKPOT_PYTHON "" CACHE FILEPATH "Python interpreter with torch and the test packages")
if(DEFINED ENV{STOCKPOT_PYTHON})
  set(STOCKPOT_PYTHON $ENV{STOCKPOT_PYTHON} CACHE FILEPATH "" FORCE)
elseif(NOT STOCKPOT_PYTHON)
  execute_process(COMMAND ${PROJECT_SOURCE_DIR}/cmake/setup.sh --print-python
                  OUTPUT_VARIABLE stockpot_python OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(STOCKPOT_PYTHON ${stockpot_python} CACHE FILEPATH "" FORCE)
endif()
# find_spec does not import torch, which would take seconds.
execute_process(
  COMMAND ${STOCKPOT_PYTHON} -c
    "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
  OUTPUT_VARIABLE TORCH_WHEEL_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
unset(TORCH_CPU_LIBRARY CACHE)
unset(C10_LIBRARY CACHE)
find_library(TORCH_CPU_LIBRARY torch_cpu PATHS "${TORCH_WHEEL_DIR}/lib" NO_DEFAULT_PATH)
find_library(C10_LIBRARY c10 PATHS "${TORCH_WHEEL_DIR}/lib" NO_DEFAULT_PATH)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchWheel
  REQUIRED_VARS TORCH_WHEEL_DIR TORCH_CPU_LIBRARY C10_LIBRARY
  REASON_FAILURE_MESSAGE "no interpreter with torch: run cmake/setup.sh, or set STOCKPOT_PYTHON")

if(NOT TARGET stockpot::torch)
  add_library(stockpot::torch INTERFACE IMPORTED)
  target_include_directories(stockpot::torch SYSTEM INTERFACE
    ${TORCH_WHEEL_DIR}/include ${TORCH_WHEEL_DIR}/include/torch/csrc/api/include)
  target_link_libraries(stockpot::torch INTERFACE ${TORCH_CPU_LIBRARY} ${C10_LIBRARY})
  # The wheel's libraries find their own NVIDIA neighbours by RPATH.
  target_link_options(stockpot::torch INTERFACE -Wl,-rpath,${TORCH_WHEEL_DIR}/lib
    -Wl,--allow-shlib-undefined)
endif()
