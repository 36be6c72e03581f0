#include "dtensor/core/rules/rules.h"

namespace dtensor::rules {
namespace {

// Linear algebra on matrices that are whole; what stands before them may be cut. Transforms leave the other dims alone.
constexpr RuleText kRows[] = {
    {"aten::_cdist_backward", "...mn,...mK,...nK,...mn->...mK", "skip_empty linear(0)"},
    {"aten::_cdist_forward", "...mK,...nK->...mn"},
    {"aten::_cholesky_solve_helper", "...PQ,...MN->...PQ", "linear(0)"},
    {"aten::_euclidean_dist", "...mK,...nK->...mn"},
    {"aten::_fft_c2c", "...->...", "dims(1) linear(0)"},
    {"aten::_fft_c2r", "...->...", "dims(1) linear(0)"},
    {"aten::_fft_r2c", "...->...", "dims(1) linear(0)"},
    {"aten::_linalg_det", "...MN->...,...MN,...M"},
    {"aten::_linalg_eigh", "...MN->...M,...MN"},
    {"aten::_linalg_eigvals", "...MN->...M"},
    {"aten::_linalg_slogdet", "...MN->...,...,...MN,...M"},
    {"aten::_linalg_svd", "...MN->...MK,...K,...KN"},
    {"aten::_pdist_backward", "", "replicated"},
    {"aten::_pdist_forward", "", "replicated"},
    {"aten::addbmm", "+mn,bmk,bkn->mn", "linear(1) linear(2)"},
    {"aten::block_diag", "", "replicated"},
    {"aten::cholesky", "...MN->...MN"},
    {"aten::cholesky_inverse", "...MN->...MN"},
    {"aten::cholesky_solve", "...PQ,...MN->...PQ", "linear(0)"},
    {"aten::geqrf", "...MN->...MN,...K"},
    {"aten::linalg_cholesky_ex", "...MN->...MN,..."},
    {"aten::linalg_cross", "...,...->...", "dims(2) linear(0) linear(1)"},
    {"aten::linalg_eig", "...MN->...M,...MN"},
    {"aten::linalg_householder_product", "...MN,...K->...MN"},
    {"aten::linalg_inv_ex", "...MN->...MN,..."},
    {"aten::linalg_ldl_factor_ex", "...MN->...MN,...K,..."},
    {"aten::linalg_ldl_solve", "...MN,...K,...PQ->...PQ", "linear(2)"},
    {"aten::linalg_lu", "...MN->...MM,...MK,...KN"},
    {"aten::linalg_lu_factor_ex", "...MN->...MN,...K,..."},
    {"aten::linalg_lu_solve", "...MN,...K,...PQ->...PQ", "linear(2)"},
    {"aten::linalg_matrix_exp", "...MN->...MN"},
    {"aten::linalg_qr", "...MN->...MK,...KN"},
    {"aten::linalg_solve_triangular", "...MN,...PQ->...PQ", "linear(1)"},
    {"aten::lu_unpack", "...MN,...K->...MM,...MK,...KN"},
    {"aten::ormqr", "...MN,...K,...PQ->...PQ", "linear(2)"},
    {"aten::renorm", "", "replicated"},
    {"aten::trace", "MN->", "linear(0)"},
    {"aten::triangular_solve", "...PQ,...MN->...PQ,...MN"},
};

}  // namespace

std::span<const RuleText> linalg() { return kRows; }

}  // namespace dtensor::rules
