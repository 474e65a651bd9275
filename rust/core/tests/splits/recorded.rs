//! Recorded bodies of real engines give the same result, however they are split.

use std::path::{Path, PathBuf};

use streamfold_core::{Dialect, Options};

use crate::common::read;

fn bodies() -> Vec<PathBuf> {
    let streams = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/streams");
    let entries =
        |folder: PathBuf| std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path());
    let folders = entries(streams).filter(|path| path.is_dir());
    folders.flat_map(entries).filter(|path| path.extension().is_some_and(|extension| extension == "sse")).collect()
}

#[test]
fn any_split_of_a_recorded_stream_gives_the_same() {
    let mut engines = [0; 2];
    for path in bodies() {
        let body = std::fs::read(&path).expect("readable");
        let folder = path.parent().and_then(Path::file_name).expect("a folder").to_string_lossy();
        let is_vllm = folder.starts_with("vllm");
        engines[usize::from(is_vllm)] += 1;
        let dialect = if is_vllm { Dialect::Vllm } else { Dialect::Sglang };
        for logprobs in [true, false] {
            let options = Options { logprobs, ..Options::default() };
            let whole = read([&body[..]], dialect, options);
            for step in [1, 2, 7, 61, 1021] {
                assert_eq!(read(body.chunks(step), dialect, options), whole, "{} by {step}", path.display());
            }
        }
    }
    assert!(engines.iter().all(|&count| count > 20), "{engines:?}");
}
