# Builds of llama-cpp-python the libraries that its server loads, and of those as little as goes:
# plain code for any CPU, compiled fast, because the tests' model has two layers.
set(LLAVA_BUILD OFF)
set(LLAMA_BUILD_COMMON OFF) # half of the compile time, and only for llama.cpp's own tools
set(LLAMA_BUILD_TOOLS OFF)
set(LLAMA_BUILD_TESTS OFF)
set(LLAMA_BUILD_EXAMPLES OFF)
set(LLAMA_BUILD_SERVER OFF)
set(LLAMA_BUILD_APP OFF)
set(GGML_NATIVE OFF)
set(GGML_OPENMP OFF)
set(GGML_LLAMAFILE OFF)
set(GGML_CPU_REPACK OFF)
foreach(extension SSE42 AVX AVX2 BMI2 FMA F16C)
  set(GGML_${extension} OFF)
endforeach()
set(CMAKE_C_FLAGS_RELEASE "-O1")
set(CMAKE_CXX_FLAGS_RELEASE "-O0")
