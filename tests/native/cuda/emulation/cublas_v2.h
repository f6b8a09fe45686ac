// Implements the functions of cuBLAS that ggml-cuda calls with simple loops, which run on the
// stream of the handle.

#pragma once

#include "cuda_fp16.h"

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS,
    CUBLAS_STATUS_NOT_INITIALIZED,
    CUBLAS_STATUS_ALLOC_FAILED,
    CUBLAS_STATUS_INVALID_VALUE,
    CUBLAS_STATUS_ARCH_MISMATCH,
    CUBLAS_STATUS_MAPPING_ERROR,
    CUBLAS_STATUS_EXECUTION_FAILED,
    CUBLAS_STATUS_INTERNAL_ERROR,
    CUBLAS_STATUS_NOT_SUPPORTED,
};
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasMath_t { CUBLAS_DEFAULT_MATH, CUBLAS_TF32_TENSOR_OP_MATH };
enum cublasComputeType_t { CUBLAS_COMPUTE_16F, CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_16F };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };
enum cudaDataType_t { CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF };
using cudaDataType = cudaDataType_t;

struct moe_emu_cublas {
    cudaStream_t stream = nullptr;
};
using cublasHandle_t = moe_emu_cublas *;

cublasStatus_t cublasCreate(cublasHandle_t * handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const float * alpha,
    const float * a, int lda, const float * b, int ldb, const float * beta, float * c, int ldc);
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void * alpha,
    const void * a, cudaDataType_t type_a, int lda, const void * b, cudaDataType_t type_b, int ldb, const void * beta,
    void * c, cudaDataType_t type_c, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algorithm);
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void * alpha,
    const void * a, cudaDataType_t type_a, int lda, long long stride_a, const void * b, cudaDataType_t type_b, int ldb, long long stride_b, const void * beta,
    void * c, cudaDataType_t type_c, int ldc, long long stride_c, int count, cublasComputeType_t compute, cublasGemmAlgo_t algorithm);
cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void * alpha,
    const void * const a[], cudaDataType_t type_a, int lda, const void * const b[], cudaDataType_t type_b, int ldb, const void * beta,
    void * const c[], cudaDataType_t type_c, int ldc, int count, cublasComputeType_t compute, cublasGemmAlgo_t algorithm);
