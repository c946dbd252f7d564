use super::*;
use std::io::{Read, Write};

fn setting() -> Setting {
    Setting { container: "c".into(), namespace: "n".into(), uid: 0, gid: 0, reaper: Reaper::default() }
}

fn fifo(directory: &Path, name: &str) -> String {
    let path = directory.join(name);
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn megabytes_arrive_whole_and_the_reader_sees_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let paths = Paths { stdout: fifo(directory.path(), "out"), ..Paths::default() };
    let (mut io, Ends([_, out, _])) = Io::pipes(&paths, &setting()).await.unwrap();
    io.begin();
    let stdout = paths.stdout.clone();
    let reader = tokio::task::spawn_blocking(move || {
        let mut all = Vec::new();
        File::open(stdout).unwrap().read_to_end(&mut all).unwrap();
        all
    });
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    let sent = data.clone();
    tokio::task::spawn_blocking(move || File::from(out).write_all(&sent).unwrap()).await.unwrap();
    io.close(DRAIN).await;
    assert!(reader.await.unwrap() == data);
}

#[tokio::test]
async fn input_ends_only_after_close_io_whoever_comes_and_goes() {
    let directory = tempfile::tempdir().unwrap();
    let paths = Paths { stdin: fifo(directory.path(), "in"), ..Paths::default() };
    let (mut io, Ends([stdin, ..])) = Io::pipes(&paths, &setting()).await.unwrap();
    io.begin();
    for text in ["first ", "second"] {
        let path = paths.stdin.clone();
        tokio::task::spawn_blocking(move || {
            OpenOptions::new().write(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
        })
        .await
        .unwrap();
    }
    let reader = tokio::task::spawn_blocking(move || {
        let mut all = String::new();
        File::from(stdin).read_to_string(&mut all).unwrap();
        all
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!reader.is_finished());
    io.close_stdin();
    assert_eq!(reader.await.unwrap(), "first second");
    io.close(DRAIN).await;
}

#[tokio::test(start_paused = true)]
async fn a_close_does_not_wait_for_a_grandchild_that_holds_the_pipe() {
    let directory = tempfile::tempdir().unwrap();
    let paths = Paths { stdout: fifo(directory.path(), "out"), ..Paths::default() };
    let (mut io, ends) = Io::pipes(&paths, &setting()).await.unwrap();
    io.begin();
    let before = tokio::time::Instant::now();
    io.close(DRAIN).await;
    assert!(before.elapsed() >= DRAIN && before.elapsed() < DRAIN * 2);
    drop(ends);
}

#[tokio::test]
async fn a_file_uri_makes_the_file_and_appends() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("logs/one");
    let paths = Paths { stdout: format!("file://{}", path.display()), ..Paths::default() };
    for text in ["a\n", "b\n"] {
        let (mut io, Ends([_, out, _])) = Io::pipes(&paths, &setting()).await.unwrap();
        io.begin();
        File::from(out).write_all(text.as_bytes()).unwrap();
        io.close(DRAIN).await;
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), "a\nb\n");
}

#[tokio::test]
async fn a_missing_fifo_is_an_error_that_names_it() {
    let paths = Paths { stdout: "/nowhere/out".into(), ..Paths::default() };
    let error = Io::pipes(&paths, &setting()).await.err().unwrap();
    assert!(error.to_string().contains("/nowhere/out"));
}

#[tokio::test]
async fn a_terminal_is_copied_both_ways_and_takes_a_size() {
    let directory = tempfile::tempdir().unwrap();
    let paths = Paths {
        stdin: fifo(directory.path(), "in"),
        stdout: fifo(directory.path(), "out"),
        terminal: true,
        ..Paths::default()
    };
    let terminal = nix::pty::openpty(None, None).unwrap();
    let io = Io::terminal(&paths, terminal.master, &setting()).await.unwrap();
    io.resize(91, 17).unwrap();
    let size = rustix::termios::tcgetwinsize(&terminal.slave).unwrap();
    assert_eq!((size.ws_col, size.ws_row), (91, 17));
    let (stdin, stdout) = (paths.stdin.clone(), paths.stdout.clone());
    let seen = tokio::task::spawn_blocking(move || {
        let mut out = OpenOptions::new().read(true).open(stdout).unwrap();
        OpenOptions::new().write(true).open(stdin).unwrap().write_all(b"ping\n").unwrap();
        let mut buffer = [0; 6];
        out.read_exact(&mut buffer).unwrap();
        buffer
    })
    .await
    .unwrap();
    assert_eq!(&seen, b"ping\r\n");
    drop(terminal.slave);
    io.close(DRAIN).await;
}
