"""Names of options of ``hpctrain train`` in other programs, for the error of an unknown option.

The names are those of PyTorch's examples, torchvision's references, timm's train.py, Lightning,
Hugging Face's Trainer, Ultralytics and Horovod. "output_last" is ``--output last``. For a name with
several meanings, all options are listed. Those of "" get no suggestion: a similar name would
mislead.
"""

RANKS = "mpirun -n N, one rank for each GPU"

BY_OPTION = {
    "--model": "a arch architecture backbone net network model_name model_name_or_path",
    "--init": "pretrained weights finetune initial_checkpoint init_checkpoint load load_from",
    "--run NAME, which also resumes it": "name run_name exp exp_name experiment experiment_name"
    " auto_resume ckpt_path checkpoint_path resume_from resume_from_checkpoint",
    "--runs-dir": "out out_dir outdir output output_dir save_dir save_path work_dir log_dir logdir"
    " project checkpoint_dir default_root_dir",
    "--data": "dataset dataset_name dataset_dir data_dir data_path data_root root input train_data"
    " train_dir",
    "--keep-checkpoints": "keep keep_last max_to_keep checkpoint_hist save_top_k save_total_limit",
    "--checkpoint-every": "checkpoint_freq checkpoint_interval save_every save_freq save_interval"
    " save_period save_steps save_strategy",
    "--validate-every": "check_val_every_n_epoch eval_freq eval_interval eval_steps eval_strategy"
    " evaluation_strategy val_check_interval val_freq val_interval validate_interval",
    "--best-by": "monitor metric_for_best_model eval_metric best_metric selection_metric",
    "--final best": "best save_best load_best_model_at_end restore_best_weights output_best",
    "--final last": "output_last",
    "--patience": "early_stop early_stopping early_stopping_patience patience_epochs",
    "--epochs": "max_epochs n_epochs num_epochs num_train_epochs iters iterations max_iter"
    " max_steps num_steps total_steps",
    "--batch-size, of all ranks together, or --batch-per-rank": "b bs batch train_batch_size",
    "--batch-per-rank": "per_device_train_batch_size local_batch_size micro_batch_size",
    "--shards": "accumulate accum_iter accum_steps accumulate_grad_batches batches_per_allreduce"
    " grad_accum grad_accum_steps gradient_accumulation_steps",
    "--optimizer": "opt optim optimiser",
    "--lr": "learning_rate lr0 init_lr",
    "--lr with --scale-lr": "base_lr blr lr_base lr_base_scale",
    "--scale-lr": "lr_scale lr_scaling",
    "--max-value to divide images, --random-crop or --scale-lr": "scale",
    "--max-value": "scale_255 scale_65535 divide max_val maxval rescale rescale_factor",
    "--weight-decay": "wd",
    "--no-decay": "bias_decay filter_bias_and_bn no_weight_decay norm_weight_decay",
    "--lr-factors": "layer_decay lr_mult",
    "--schedule": "sched scheduler lr_sched lr_schedule lr_scheduler lr_scheduler_type cos_lr",
    "--warmup-epochs": "warmup warmup_epoch warmup_iters warmup_ratio warmup_steps"
    " lr_warmup_epochs num_warmup_steps",
    "--min-lr": "eta_min end_lr lr_min lrf",
    "--step-epochs": "decay_epochs lr_step_size lr_steps step_size",
    "--clip-norm": "clip clip_grad clip_grad_norm grad_clip gradient_clip_val max_grad_norm",
    "--ema": "ema_decay model_ema model_ema_decay",
    "--label-smoothing": "smoothing label_smoothing_factor",
    "--loss": "criterion loss_fn",
    "--freeze": "freeze_backbone freeze_layers frozen",
    "--class-weights": "pos_weight weighted_loss",
    "--balanced-sampling": "balance balanced oversample sampler weighted_sampler",
    "--precision": "amp amp_dtype autocast bf16 fp16 half mixed_precision native_amp tf32",
    "--comm-dtype": "compression fp16_allreduce gradient_compression",
    "--overlap": "bucket_cap_mb",
    "--batch-norm": "dist_bn sync_batchnorm sync_bn syncbn",
    "--compile": "jit torch_compile torchcompile",
    "--flip": "fliplr hflip horizontal_flip",
    "--flip-vertical": "flipud vertical_flip vflip",
    "--rotate90": "rot90 random_rotate90",
    "--augment": "aa augmentation auto_augment autoaugment color_jitter erasing random_erase"
    " random_erasing reprob transform transforms",
    "--split with --images, or that of hpctrain pack": "test_size test_split train_split"
    " train_val_split val_size val_split validation_split",
    "hpctrain pack --size": "crop_pct image_size img_size imgsz input_size resolution",
    "hpctrain evaluate RUN": "eval eval_only evaluate only_test test_only val",
    "hpctrain predict RUN": "infer inference predict",
    "--seed": "manual_seed random_seed random_state",
    "--time-limit": "max_time time walltime",
    "--hang-timeout or --time-limit": "timeout",
    "--progress": "log_every_n_steps log_interval logging_steps print_freq quiet silent verbose",
    "--tensorboard": "log_wandb logger report_to wandb",
    "--read-buffer": "buffer buffer_size cache",
    "--dry-run": "dry fast_dev_run",
    "--device": "accelerator cpu cuda no_cuda use_cpu use_cuda",
    RANKS: "devices gpu gpus ngpus nnodes nodes nproc nproc_per_node num_gpus num_nodes"
    " num_processes np strategy world_size dist_url local_rank rank master_addr master_port",
    "mpirun -n N, or --threads of each rank": "workers",
    "--threads": "cpus_per_task num_threads j num_workers dataloader_num_workers",
    "--reduce": "backend ddp_backend dist_backend",
    "": "checkpoint ckpt classes num_classes nc no_shuffle split_bn",
}
ELSEWHERE = {name: option for option, names in BY_OPTION.items() for name in names.split()}
