//! Any bytes, any dialect, any options give a generation or a typed error, never a panic. After an error every further call returns the same error.
//! The options are taken from the end of the input, so that a recorded stream is a good seed as it is.
#![no_main]

use libfuzzer_sys::fuzz_target;
use streamfold_core::{Clamped, Dialect, Dtype, Experts, Options, Parser};

fuzz_target!(|input: &[u8]| {
    let Some((body, &[choice, shape])) = input.split_last_chunk::<2>() else { return };
    let (_, dialect) = Dialect::ALL[usize::from(choice) % Dialect::ALL.len()];
    let dtype = [Dtype::Int32, Dtype::Uint8, Dtype::Uint16][usize::from(shape) % 3];
    let experts = Experts { num_layers: 2, top_k: 2, num_experts: (shape & 8 != 0).then_some(8), dtype };
    let options = Options {
        logprobs: choice & 8 == 0,
        experts: (choice & 16 != 0).then_some(experts),
        prompt_len: (choice & 32 != 0).then_some(3),
        experts_start: u64::from(shape >> 6),
        clamped: if choice & 64 == 0 { Clamped::Raise } else { Clamped::Keep },
        max_new_tokens: Some(16),
        token_limit: (shape & 16 != 0).then_some(2),
        max_event_bytes: if choice & 128 == 0 { 1 << 20 } else { 256 },
    };
    let mut parser = Parser::new(dialect, options);
    let before = parser.feed(body).err();
    let closed = parser.close(false).err();
    if before.is_some() {
        assert_eq!(before, closed, "an error stays");
    }
    let count = parser.token_count();
    let generation = parser.take();
    assert_eq!(generation.token_ids.len(), count);
    assert_eq!(generation.logprobs.as_ref().map(Vec::len), options.logprobs.then_some(count), "aligned");
    if let Some(top_p) = &generation.top_p {
        assert_eq!(top_p.offsets.len(), count + 1, "aligned");
        assert!(top_p.offsets[0] == 0 && top_p.offsets.is_sorted());
        assert_eq!(top_p.offsets[count] as usize, top_p.ids.len());
    }
    if let Some(ids) = &generation.prompt_token_ids {
        assert!(ids.iter().all(|&id| id >= 0), "token ids");
        assert!(options.prompt_len.is_none_or(|sent| sent == ids.len() as u64), "as many as were sent");
    }
    let mut covered = 0;
    for span in &generation.version_spans {
        assert!(span.start == covered && span.start < span.end, "no span is empty, and there is no gap");
        covered = span.end;
    }
    assert_eq!(covered, count, "spans cover all tokens");
    assert!(generation.padded_rows <= generation.expert_rows.unwrap_or(0));
});
