//! Routed experts: the shape that they must have, and which rows hold experts.
//!
//! An engine that has no experts for a token fills the token's row with -1, in the unsigned types with 255 or 65535.
//! Such a padded row is kept and counted. A row that is padded in part was damaged on its way.

use std::fmt::Write;

use bytemuck::Pod;

use crate::arrays::metadata_error;
use crate::error::EventError;
use crate::generation::RoutedExperts;
use crate::options::{Experts, Options};

/// Routed experts that have passed every check.
pub(crate) struct CheckedExperts {
    pub ids: RoutedExperts,
    /// None: the caller gave no `experts`, so that the shape is not known.
    pub rows: Option<usize>,
    pub padded_rows: usize,
}

/// The required shape of routed experts.
pub(crate) struct ExpertShape {
    experts: Experts,
    /// The rows from `experts_start` on.
    pub rows: usize,
    /// The rows before those. Engines that do not know the key for the start, or did not receive it, send them too.
    pub rows_before: usize,
    /// How the number of rows is computed, for a message.
    pub why: String,
}

impl ExpertShape {
    /// The required shape after `total` tokens; None if the caller gave no `experts`.
    pub(crate) fn of(
        options: &Options,
        prompt_tokens: Option<u64>,
        total: usize,
        at: usize,
        path: &'static str,
    ) -> Result<Option<Self>, EventError> {
        let Some(experts) = options.experts else { return Ok(None) };
        let Some(prompt) = options.prompt_len.or(prompt_tokens) else {
            return Err(metadata_error(at, path, "the number of prompt tokens is not known; pass prompt_len"));
        };
        let prompt = usize::try_from(prompt).unwrap_or(usize::MAX);
        let start = usize::try_from(options.experts_start).unwrap_or(usize::MAX);
        let all = prompt.saturating_add(total).saturating_sub(1);
        let rows = all.saturating_sub(start);
        let mut why = format!("{rows} rows ({prompt} of the prompt + {total} tokens - 1 - {start})");
        if start > 0 {
            let _ = write!(why, ", or all {all},");
        }
        let _ = write!(why, " of {} layers and top {}", experts.num_layers, experts.top_k);
        let shape = Self { experts, rows, rows_before: all - rows, why };
        match shape.checked_numbers(all) {
            Some(_) => Ok(Some(shape)),
            None => Err(metadata_error(at, path, format!("{}: too many", shape.why))),
        }
    }

    fn checked_numbers(&self, rows: usize) -> Option<usize> {
        rows.checked_mul(self.experts.num_layers)?.checked_mul(self.experts.top_k)
    }

    /// The number of ids in the rows from the start on, or in all rows.
    pub(crate) fn numbers(&self, is_whole: bool) -> usize {
        let rows = if is_whole { self.rows_before + self.rows } else { self.rows };
        self.checked_numbers(rows).unwrap_or(usize::MAX)
    }

    /// Check the rows that `check` has not seen yet, count the padded ones, and drop those before the start.
    pub(crate) fn finish<T: ExpertId>(
        &self,
        mut ids: Vec<T>,
        mut check: RowCheck,
        is_whole: bool,
        at: usize,
        path: &'static str,
    ) -> Result<CheckedExperts, EventError> {
        check.check_new(&ids);
        check.finish(at, path)?;
        if is_whole {
            ids.drain(..ids.len() - self.numbers(false));
            ids.shrink_to_fit();
            check = RowCheck::new(self.experts);
            check.check_new(&ids);
        }
        Ok(CheckedExperts { ids: T::array(ids), rows: Some(self.rows), padded_rows: check.padded_rows })
    }
}

/// A type of ids on the wire.
pub(crate) trait ExpertId: Pod + PartialEq {
    /// Fills padded rows: -1, or what -1 is in an unsigned type.
    const MARK: Self;

    /// Negative ids become larger than every number of experts.
    fn unsigned(self) -> u32;

    fn array(ids: Vec<Self>) -> RoutedExperts;
}

impl ExpertId for i32 {
    const MARK: Self = -1;

    fn unsigned(self) -> u32 {
        self.cast_unsigned()
    }

    fn array(ids: Vec<Self>) -> RoutedExperts {
        RoutedExperts::Int32(ids)
    }
}

impl ExpertId for u8 {
    const MARK: Self = Self::MAX;

    fn unsigned(self) -> u32 {
        self.into()
    }

    fn array(ids: Vec<Self>) -> RoutedExperts {
        RoutedExperts::Uint8(ids)
    }
}

impl ExpertId for u16 {
    const MARK: Self = Self::MAX;

    fn unsigned(self) -> u32 {
        self.into()
    }

    fn array(ids: Vec<Self>) -> RoutedExperts {
        RoutedExperts::Uint16(ids)
    }
}

/// The ids that are looked at before the rows are, if one of them is out of the ordinary.
const BATCH: usize = 1024;

/// What is wrong with a row.
enum RowError {
    Outside { id: i64 },
    PaddedInPart { row: usize },
    Ambiguous { row: usize },
}

/// Checks rows and counts the padded ones.
pub(crate) struct RowCheck {
    experts: Experts,
    /// Ids in each row.
    width: usize,
    checked: usize,
    padded_rows: usize,
    error: Option<RowError>,
}

impl RowCheck {
    pub(crate) fn new(experts: Experts) -> Self {
        let width = experts.num_layers.saturating_mul(experts.top_k);
        Self { experts, width, checked: 0, padded_rows: 0, error: None }
    }

    /// Check the rows that are complete in `ids`, which begin with those of the last call.
    pub(crate) fn check_new<T: ExpertId>(&mut self, ids: &[T]) {
        let complete = ids.len() - ids.len() % self.width;
        let first = self.first_extraordinary(T::MARK);
        let batch = self.width.saturating_mul((BATCH / self.width).max(1));
        for rows in ids[self.checked..complete].chunks(batch) {
            // Without a branch for each id.
            if self.error.is_none() && rows.iter().fold(false, |found, &id| found | (id.unsigned() >= first)) {
                self.check_rows(rows);
            }
            self.checked += rows.len();
        }
    }

    /// Whether every row is sound.
    fn finish(&self, at: usize, path: &'static str) -> Result<(), EventError> {
        let message = match (&self.error, self.experts.num_experts) {
            (None, _) => return Ok(()),
            (Some(RowError::Outside { id }), Some(limit)) => {
                format!("found expert {id}, but there are {limit} experts; check the dtype of Experts")
            }
            (Some(RowError::Outside { id }), None) => {
                format!("found expert {id}, but ids must be at least -1; check the dtype of Experts")
            }
            (Some(RowError::PaddedInPart { row }), _) => {
                format!("some slots of row {row} are padding and others are experts")
            }
            (Some(RowError::Ambiguous { row }), _) => format!(
                "row {row} may be padding or hold the last expert; request a larger dtype, or pass num_experts if it is \
                 no expert"
            ),
        };
        Err(metadata_error(at, path, message))
    }

    /// The least id, as an unsigned number, that is no expert or fills padded rows.
    fn first_extraordinary<T: ExpertId>(&self, mark: T) -> u32 {
        mark.unsigned().min(self.limit())
    }

    fn limit(&self) -> u32 {
        self.experts.num_experts.unwrap_or(1 << 31)
    }

    fn check_rows<T: ExpertId>(&mut self, ids: &[T]) {
        let may_be_expert = T::MARK.unsigned() < self.limit();
        let top_k = self.experts.top_k;
        for (index, row) in ids.chunks_exact(self.width).enumerate() {
            let marks = count(row);
            let number = self.checked / self.width + index;
            if marks == self.width {
                // The experts of a layer are distinct, so only a single one can equal the mark.
                if may_be_expert && top_k == 1 {
                    self.error = Some(RowError::Ambiguous { row: number });
                    return;
                }
                self.padded_rows += 1;
                continue;
            }
            let is_padded_in_part = if may_be_expert { marks > 1 && has_repeat(row, top_k) } else { marks > 0 };
            if is_padded_in_part {
                self.error = Some(RowError::PaddedInPart { row: number });
                return;
            }
            // A mark that may be an expert is the largest id of its type, so that none is outside.
            let limit = self.limit();
            if !may_be_expert && let Some(&id) = row.iter().find(|id| id.unsigned() >= limit) {
                self.error = Some(RowError::Outside { id: i64::from(id.unsigned().cast_signed()) });
                return;
            }
        }
    }
}

/// Whether a layer has the mark twice.
fn has_repeat<T: ExpertId>(row: &[T], top_k: usize) -> bool {
    let mut last = None;
    row.iter().enumerate().filter(|&(_, &id)| id == T::MARK).any(|(slot, _)| {
        let layer = slot / top_k;
        last.replace(layer) == Some(layer)
    })
}

/// How many of the ids are the mark of padding.
fn count<T: ExpertId>(ids: &[T]) -> usize {
    // In parts whose count fits a byte: so it is vectorized.
    ids.chunks(128).map(|part| usize::from(part.iter().map(|&id| u8::from(id == T::MARK)).sum::<u8>())).sum()
}
